// Layers in one pass over memory each, for one thread. mcore_rl/backend/cpu/compiled.py builds and calls them; the
// Python beside each caller computes the same. All matrices are row-major, contiguous, float32. The order of sums is
// fixed by the build. Loops carry "omp simd" because a compiler may not reorder sums of floats by itself.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

// C [M, N] = beta * C + op(A) op(B); A is stored [K, M] where it is transposed, B [N, K]. BLAS is column-major, so that
// the operands change places.
void product(Sgemm sgemm, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
             const float* b, float beta, float* c) {
    const int m = int(M), n = int(N), k = int(K);
    const int lda = transpose_a ? m : k, ldb = transpose_b ? k : n;
    const float one = 1.0f;
    sgemm(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &n, &m, &k, &one, b, &ldb, a, &lda, &beta, c, &n);
}

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

}  // namespace

extern "C" {

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

// (a, b) -> (a cos - b sin, b cos + a sin) for the halves of each head [positions, heads, width]; cos and sin are
// [positions / repeats, width]. With sign -1 the other way round, which is the gradient.
void rotate(const float* in, const float* cos, const float* sin, int64_t positions, int64_t repeats, int64_t heads,
            int64_t width, float sign, float* out) {
    const int64_t half = width / 2;
    for (int64_t s = 0; s < positions; s++) {
        const float *c = cos + s / repeats * width, *z = sin + s / repeats * width;
        // The gradient multiplies by the sine of the half that the value went to.
        const float *z_first = sign > 0 ? z : z + half, *z_second = sign > 0 ? z + half : z;
        for (int64_t h = 0; h < heads; h++, in += width, out += width) {
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                out[d] = in[d] * c[d] - sign * in[half + d] * z_first[d];
                out[half + d] = in[half + d] * c[half + d] + sign * in[d] * z_second[d];
            }
        }
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
// scratch: 2 * largest block * (D + F).
void experts_forward(Sgemm sgemm, const float* x, const float* gates, const float* fc1, const float* fc2,
                     const int64_t* rows, const int64_t* blocks, int64_t num_blocks, int64_t D, int64_t F,
                     float* hidden, float* output, float* scratch) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t expert = blocks[3 * b], first = blocks[3 * b + 1], count = blocks[3 * b + 2] - first;
        float *gathered = scratch, *active = gathered + count * D, *result = active + count * F;
        float* h = hidden + first * 2 * F;
        copy_rows(x, rows + first, count, D, gathered);
        product(sgemm, false, true, count, 2 * F, D, gathered, fc1 + expert * 2 * F * D, 0.0f, h);
        for (int64_t i = 0; i < count; i++) {
            const float *z = h + i * 2 * F, *up = z + F;
            const float gate = gates[first + i];
            float* a = active + i * F;
#pragma omp simd
            for (int64_t f = 0; f < F; f++) a[f] = z[f] * sigmoid(z[f]) * up[f] * gate;
        }
        product(sgemm, false, true, count, D, F, active, fc2 + expert * D * F, 0.0f, result);
        add_rows(result, rows + first, count, D, output);
    }
}

// Gradients of experts_forward. Those of the weights are added to what is there; d_x [T, D] begins as zeros.
// scratch: largest block * (3 D + 4 F).
void experts_backward(Sgemm sgemm, const float* d_output, const float* x, const float* gates, const float* fc1,
                      const float* fc2, const int64_t* rows, const int64_t* blocks, int64_t num_blocks, int64_t D,
                      int64_t F, const float* hidden, float* d_x, float* d_gates, float* d_fc1, float* d_fc2,
                      float* scratch) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t expert = blocks[3 * b], first = blocks[3 * b + 1], count = blocks[3 * b + 2] - first;
        float *d_out = scratch, *gathered = d_out + count * D, *result = gathered + count * D;
        float *active = result + count * D, *d_active = active + count * F, *d_hidden = d_active + count * F;
        const float* h = hidden + first * 2 * F;
        copy_rows(d_output, rows + first, count, D, d_out);
        copy_rows(x, rows + first, count, D, gathered);
        product(sgemm, false, false, count, F, D, d_out, fc2 + expert * D * F, 0.0f, d_active);
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
        product(sgemm, true, false, D, F, count, d_out, active, 1.0f, d_fc2 + expert * D * F);
        product(sgemm, true, false, 2 * F, D, count, d_hidden, gathered, 1.0f, d_fc1 + expert * 2 * F * D);
        product(sgemm, false, false, count, D, 2 * F, d_hidden, fc1 + expert * 2 * F * D, 0.0f, result);
        add_rows(result, rows + first, count, D, d_x);
    }
}

}  // extern "C"
