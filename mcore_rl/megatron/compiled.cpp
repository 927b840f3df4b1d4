// Layers in one pass over memory each, for one thread. mcore_rl/megatron/compiled.py builds them, and the modules of
// mcore_rl/model/layers/cpu call them. All matrices are row-major, contiguous, float32. The order of sums is
// fixed by the build. Loops carry "omp simd" because a compiler may not reorder sums of floats by itself.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "compiled_products.h"

namespace {

// e^x to 2 ulp: 2^n times a polynomial on |r| <= ln 2 / 2 (its coefficients are those of the series). The library's
// would be a call for each element. NaN stays NaN, as both comparisons are false for it.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the lowest bits are then round(x / ln 2)
    const float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = int32_t((uint32_t(bits) + 127u) << 23);
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

void copy_rows(const float* from, const int64_t* rows, int64_t count, int64_t width, float* to) {
    for (int64_t i = 0; i < count; i++) std::memcpy(to + i * width, from + rows[i] * width, width * sizeof(float));
}

void add_rows(const float* from, const int64_t* rows, int64_t count, int64_t width, float* to) {
    for (int64_t i = 0; i < count; i++) {
        float* target = to + rows[i] * width;
        const float* source = from + i * width;
#pragma omp simd
        for (int64_t d = 0; d < width; d++) target[d] += source[d];
    }
}

// Heads of one group at one position of a mixed projection: queries, a key, a value. WIDTH is that of a head, 0 where it
// is known at run time only. Weights are null without a norm, cos and sin without a rotation.
template <int WIDTH>
void split_position(const float* mixed, const float* const* weights, const float* cos, const float* sin, int64_t queries,
                    int64_t run_time_width, float eps, float* const* outputs, float* inverse) {
    const int64_t width = WIDTH ? WIDTH : run_time_width, half = width / 2;
    for (int64_t h = 0; h <= queries; h++, mixed += width) {
        const float* weight = weights[h == queries];
        float *out = h == queries ? outputs[1] : outputs[0] + h * width, scale = 1.0f;
        if (weight) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < width; d++) sum += mixed[d] * mixed[d];
            scale = 1.0f / std::sqrt(sum / float(width) + eps);
            inverse[h] = scale;
        }
        if (!cos) {
#pragma omp simd
            for (int64_t d = 0; d < width; d++) out[d] = weight ? mixed[d] * scale * weight[d] : mixed[d];
            continue;
        }
#pragma omp simd
        for (int64_t d = 0; d < half; d++) {
            const float a = weight ? mixed[d] * scale * weight[d] : mixed[d];
            const float b = weight ? mixed[half + d] * scale * weight[half + d] : mixed[half + d];
            out[d] = a * cos[d] - b * sin[d];
            out[half + d] = b * cos[half + d] + a * sin[half + d];
        }
    }
    std::memcpy(outputs[2], mixed, width * sizeof(float));
}

// Gradients of split_position. d_weights are added to; turned [width] is scratch.
template <int WIDTH>
void join_position(const float* const* gradients, const int64_t* strides, const float* mixed, const float* const* weights,
                   const float* cos, const float* sin, int64_t queries, int64_t run_time_width, const float* inverse,
                   float* d_mixed, float* const* d_weights, float* turned) {
    const int64_t width = WIDTH ? WIDTH : run_time_width, half = width / 2;
    for (int64_t h = 0; h <= queries; h++, mixed += width, d_mixed += width) {
        const float* weight = weights[h == queries];
        const float* g = h == queries ? gradients[1] : gradients[0] + h * strides[2];
        if (cos) {
            // The gradient multiplies by the sine of the half that the value went to.
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                turned[d] = g[d] * cos[d] + g[half + d] * sin[half + d];
                turned[half + d] = g[half + d] * cos[half + d] - g[d] * sin[d];
            }
            g = turned;
        }
        if (!weight) {
            std::memcpy(d_mixed, g, width * sizeof(float));
            continue;
        }
        float sum = 0.0f, *d_weight = d_weights[h == queries];
        const float scale = inverse[h];
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < width; d++) sum += g[d] * weight[d] * mixed[d];
        const float mean = sum * scale * scale * scale / float(width);
#pragma omp simd
        for (int64_t d = 0; d < width; d++) {
            d_weight[d] += g[d] * mixed[d] * scale;
            d_mixed[d] = g[d] * weight[d] * scale - mixed[d] * mean;
        }
    }
    std::memcpy(d_mixed, gradients[2], width * sizeof(float));
}

}  // namespace

extern "C" {

// C [M, N] = op(A) op(B) of operands that are rounded to bf16, with sums in fp32. A is stored [K, M] where it is
// transposed, B [N, K]; strides are those between their rows as stored.
void rounded_product(Sgemm sgemm, int64_t transpose_a, int64_t transpose_b, int64_t M, int64_t N, int64_t K,
                     const float* a, int64_t stride_a, const float* b, int64_t stride_b, float* c, int64_t stride_c) {
    product_by(true)(sgemm, transpose_a, transpose_b, M, N, K, a, stride_a, b, stride_b, 0.0f, c, stride_c);
}

// y = x / rms(x) * weight for rows [rows, width]; inverse [rows] is 1 / rms.
void rms_norm_forward(const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* y,
                      float* inverse) {
    for (int64_t i = 0; i < rows; i++, x += width, y += width) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < width; d++) sum += x[d] * x[d];
        const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
        inverse[i] = scale;
#pragma omp simd
        for (int64_t d = 0; d < width; d++) y[d] = x[d] * scale * weight[d];
    }
}

// Gradients of rms_norm_forward. d_weight is the sum over rows, made from sums of 64 rows in `part` [width], so that
// rounding does not grow with the number of rows.
void rms_norm_backward(const float* dy, const float* x, const float* weight, const float* inverse, int64_t rows,
                       int64_t width, float* dx, float* d_weight, float* part) {
    std::memset(d_weight, 0, width * sizeof(float));
    for (int64_t first = 0; first < rows; first += 64) {
        const int64_t last = first + 64 < rows ? first + 64 : rows;
        std::memset(part, 0, width * sizeof(float));
        for (int64_t i = first; i < last; i++) {
            const float *g = dy + i * width, *in = x + i * width;
            const float scale = inverse[i];
            float* out = dx + i * width;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < width; d++) sum += g[d] * weight[d] * in[d];
            const float mean = sum * scale * scale * scale / float(width);
#pragma omp simd
            for (int64_t d = 0; d < width; d++) {
                part[d] += g[d] * in[d] * scale;
                out[d] = g[d] * weight[d] * scale - in[d] * mean;
            }
        }
#pragma omp simd
        for (int64_t d = 0; d < width; d++) d_weight[d] += part[d];
    }
}

// A mixed projection [S, B, groups, queries + 2 heads, width] as queries [S, B, groups * queries, width], keys and values
// [S, B, groups, width]; queries and keys normalized by their weights, unless they are null, and turned by the angles of
// their position, unless those are null. cos and sin are [angles, width], and positions [S] their rows, row s where it is
// null. inverse [S, B, groups, queries + 1] is 1 / rms of each head.
void split_heads(const float* mixed, const float* query_weight, const float* key_weight, const float* cos,
                 const float* sin, const int64_t* positions, int64_t S, int64_t B, int64_t groups, int64_t queries,
                 int64_t width, float eps, float* query, float* key, float* value, float* inverse) {
    const auto split = width == 32    ? split_position<32>
                       : width == 64  ? split_position<64>
                       : width == 128 ? split_position<128>
                                      : split_position<0>;
    const float* weights[] = {query_weight, key_weight};
    for (int64_t s = 0; s < S; s++) {
        const int64_t row = positions ? positions[s] : s;
        const float *c = cos ? cos + row * width : nullptr, *z = sin ? sin + row * width : nullptr;
        for (int64_t i = s * B * groups; i < (s + 1) * B * groups; i++) {
            float* outputs[] = {query + i * queries * width, key + i * width, value + i * width};
            split(mixed + i * (queries + 2) * width, weights, c, z, queries, width, eps, outputs,
                  inverse + i * (queries + 1));
        }
    }
}

// Gradients of split_heads. Those of the heads lie as `strides` say: of positions, rows and heads, for each of the three.
// d_weights [2, width] are sums over positions, made from sums of 64 of them; scratch: 3 * width.
void join_heads(const float* d_query, const float* d_key, const float* d_value, const int64_t* strides,
                const float* mixed, const float* query_weight, const float* key_weight, const float* cos,
                const float* sin, const int64_t* positions, int64_t S, int64_t B, int64_t groups, int64_t queries,
                int64_t width, const float* inverse, float* d_mixed, float* d_weights, float* scratch) {
    const auto join = width == 32    ? join_position<32>
                      : width == 64  ? join_position<64>
                      : width == 128 ? join_position<128>
                                     : join_position<0>;
    const float* weights[] = {query_weight, key_weight};
    float *part = scratch, *parts[] = {part, part + width}, *turned = part + 2 * width;
    std::memset(d_weights, 0, 2 * width * sizeof(float));
    for (int64_t first = 0; first < S; first += 64) {
        const int64_t last = first + 64 < S ? first + 64 : S;
        std::memset(part, 0, 2 * width * sizeof(float));
        for (int64_t s = first; s < last; s++) {
            const int64_t row = positions ? positions[s] : s;
            const float *c = cos ? cos + row * width : nullptr, *z = sin ? sin + row * width : nullptr;
            for (int64_t b = 0; b < B; b++)
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t i = (s * B + b) * groups + g;
                    const float* gradients[] = {
                        d_query + s * strides[0] + b * strides[1] + g * queries * strides[2],
                        d_key + s * strides[3] + b * strides[4] + g * strides[5],
                        d_value + s * strides[6] + b * strides[7] + g * strides[8]};
                    join(gradients, strides, mixed + i * (queries + 2) * width, weights, c, z, queries, width,
                         inverse + i * (queries + 1), d_mixed + i * (queries + 2) * width, parts, turned);
                }
        }
        for (int64_t d = 0; d < 2 * width; d++) d_weights[d] += part[d];
    }
}

// Attention of one new token in each of `slots` rows, query [slots, groups * heads, width], over the keys
// [slots, room, groups, width] and values [slots, room, groups, value_width] of its own row: positions[s] and up to
// `window` before it. Each result depends on its own row alone. scratch: heads * room.
void decode_attention(const float* query, const float* keys, const float* values, const int64_t* positions,
                      int64_t slots, int64_t room, int64_t groups, int64_t heads, int64_t width, int64_t value_width,
                      int64_t window, float scale, float* output, float* scratch) {
    for (int64_t s = 0; s < slots; s++) {
        const int64_t last = positions[s], first = last > window ? last - window : 0, count = last + 1 - first;
        for (int64_t g = 0; g < groups; g++) {
            const float* q = query + (s * groups + g) * heads * width;
            const float* k = keys + ((s * room + first) * groups + g) * width;
            const float* v = values + ((s * room + first) * groups + g) * value_width;
            float* out = output + (s * groups + g) * heads * value_width;
            for (int64_t i = 0; i < count; i++) {
                const float* key = k + i * groups * width;
                for (int64_t h = 0; h < heads; h++) {
                    float score = 0.0f;
#pragma omp simd reduction(+ : score)
                    for (int64_t d = 0; d < width; d++) score += q[h * width + d] * key[d];
                    scratch[h * count + i] = score * scale;
                }
            }
            for (int64_t h = 0; h < heads; h++) {
                float* weights = scratch + h * count;
                float highest = weights[0], sum = 0.0f;
#pragma omp simd reduction(max : highest)
                for (int64_t i = 0; i < count; i++) highest = weights[i] > highest ? weights[i] : highest;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; i++) {
                    weights[i] = exponential(weights[i] - highest);
                    sum += weights[i];
                }
                const float inverse = 1.0f / sum;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) weights[i] *= inverse;
            }
            std::memset(out, 0, heads * value_width * sizeof(float));
            for (int64_t i = 0; i < count; i++) {
                const float* value = v + i * groups * value_width;
                for (int64_t h = 0; h < heads; h++) {
                    const float weight = scratch[h * count + i];
                    float* row = out + h * value_width;
#pragma omp simd
                    for (int64_t d = 0; d < value_width; d++) row[d] += weight * value[d];
                }
            }
        }
    }
}

// Experts of SwiGLU: for each block (expert, first, last) of the rows sorted by expert, gather, fc1, activation times
// gate, fc2, and sum into the output [T, D], which begins as zeros. hidden [N, 2F] is kept for the backward pass.
// scratch: 2 * largest block * (D + F). Products round their operands to bf16 where `rounds` is true; nothing else does.
void experts_forward(Sgemm sgemm, int64_t rounds, const float* x, const float* gates, const float* fc1,
                     const float* fc2, const int64_t* rows, const int64_t* blocks, int64_t num_blocks, int64_t D,
                     int64_t F, float* hidden, float* output, float* scratch) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t expert = blocks[3 * b], first = blocks[3 * b + 1], count = blocks[3 * b + 2] - first;
        float *gathered = scratch, *active = gathered + count * D, *result = active + count * F;
        float* h = hidden + first * 2 * F;
        copy_rows(x, rows + first, count, D, gathered);
        product(sgemm, rounds, false, true, count, 2 * F, D, gathered, fc1 + expert * 2 * F * D, 0.0f, h);
        for (int64_t i = 0; i < count; i++) {
            const float *z = h + i * 2 * F, *up = z + F;
            const float gate = gates[first + i];
            float* a = active + i * F;
#pragma omp simd
            for (int64_t f = 0; f < F; f++) a[f] = z[f] * sigmoid(z[f]) * up[f] * gate;
        }
        product(sgemm, rounds, false, true, count, D, F, active, fc2 + expert * D * F, 0.0f, result);
        add_rows(result, rows + first, count, D, output);
    }
}

// Gradients of experts_forward. Those of the weights are added to what is there; d_x [T, D] begins as zeros.
// scratch: largest block * (3 D + 4 F).
void experts_backward(Sgemm sgemm, int64_t rounds, const float* d_output, const float* x, const float* gates,
                      const float* fc1, const float* fc2, const int64_t* rows, const int64_t* blocks,
                      int64_t num_blocks, int64_t D, int64_t F, const float* hidden, float* d_x, float* d_gates,
                      float* d_fc1, float* d_fc2, float* scratch) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t expert = blocks[3 * b], first = blocks[3 * b + 1], count = blocks[3 * b + 2] - first;
        float *d_out = scratch, *gathered = d_out + count * D, *result = gathered + count * D;
        float *active = result + count * D, *d_active = active + count * F, *d_hidden = d_active + count * F;
        const float* h = hidden + first * 2 * F;
        copy_rows(d_output, rows + first, count, D, d_out);
        copy_rows(x, rows + first, count, D, gathered);
        product(sgemm, rounds, false, false, count, F, D, d_out, fc2 + expert * D * F, 0.0f, d_active);
        for (int64_t i = 0; i < count; i++) {
            const float *z = h + i * 2 * F, *up = z + F, *d = d_active + i * F;
            const float gate = gates[first + i];
            float *a = active + i * F, *dz = d_hidden + i * 2 * F, *d_up = dz + F;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t f = 0; f < F; f++) {
                const float s = sigmoid(z[f]), silu = z[f] * s, gated = d[f] * gate;
                sum += d[f] * silu * up[f];
                a[f] = silu * up[f] * gate;
                d_up[f] = gated * silu;
                dz[f] = gated * up[f] * s * (1.0f + z[f] * (1.0f - s));
            }
            d_gates[first + i] = sum;
        }
        product(sgemm, rounds, true, false, D, F, count, d_out, active, 1.0f, d_fc2 + expert * D * F);
        product(sgemm, rounds, true, false, 2 * F, D, count, d_hidden, gathered, 1.0f, d_fc1 + expert * 2 * F * D);
        product(sgemm, rounds, false, false, count, D, 2 * F, d_hidden, fc1 + expert * 2 * F * D, 0.0f, result);
        add_rows(result, rows + first, count, D, d_x);
    }
}

}  // extern "C"
