// Layers in one pass over memory each, for one thread. mcore_rl/backend/cpu/compiled.py builds and calls them; the
// Python beside each caller computes the same. All matrices are row-major, contiguous, float32. The order of sums is
// fixed by the build. Loops carry "omp simd" because a compiler may not reorder sums of floats by itself.
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

// C [M, N], rows a stride apart, = beta * C + op(A) op(B); A is stored [K, M] where it is transposed, B [N, K]. BLAS is
// column-major, so that the operands change places.
void product_of(Sgemm sgemm, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                int64_t stride_a, const float* b, int64_t stride_b, float beta, float* c, int64_t stride_c) {
    const int m = int(M), n = int(N), k = int(K), lda = int(stride_a), ldb = int(stride_b), ldc = int(stride_c);
    const float one = 1.0f;
    sgemm(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &n, &m, &k, &one, b, &ldb, a, &lda, &beta, c, &ldc);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef __AVX512BF16__

// Products of operands that are rounded to bf16 as they are packed; each instruction adds two products to 16 sums in
// fp32. A word is two neighbours along the summed axis. The result's tile of TILE_ROWS x TILE_COLUMNS stays in registers
// while it runs down the packed words, which stay in the second-level cache. Values below 1e-38 count as zero.
constexpr int64_t LANES = 16, TILE_ROWS = 12, TILE_COLUMNS = 2 * LANES;
constexpr int64_t DEPTH = 512, WORDS = DEPTH / 2, BLOCK_ROWS = 8 * TILE_ROWS, BLOCK_COLUMNS = 256;

// One call at a time packs: its caller holds the interpreter's lock. Rows of words may be written to their end.
alignas(64) uint32_t packed_rows[WORDS * BLOCK_ROWS + LANES];
alignas(64) uint32_t packed_columns[WORDS * BLOCK_COLUMNS];

// 16 values, of which `count` are in memory; the others are zeros.
inline __m512 values(const float* from, int64_t count) {
    return count >= LANES ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(count > 0 ? (1u << count) - 1 : 0, from);
}

inline __m512i rounded(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// Words of 16 columns from two rows, (first[j], second[j]) each.
inline __m512i paired(__m512 first, __m512 second) {
    const __m512i low = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(low, rounded(first, second));
}

// out[j * TILE_COLUMNS + i] = rows[i][j].
inline void write_transposed(__m512i* rows, uint32_t* out) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // Squares of `step` words change places with those across the diagonal; 16 + lane names the second operand.
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        const __m512i size = _mm512_set1_epi32(step), other = _mm512_set1_epi32(LANES);
        const __mmask16 odd = _mm512_test_epi32_mask(lane, size);
        const __m512i upper = _mm512_mask_add_epi32(lane, odd, _mm512_sub_epi32(lane, size), other);
        const __m512i lower = _mm512_mask_add_epi32(_mm512_add_epi32(lane, size), odd, lane, other);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            const __m512i a = rows[i], b = rows[i + step];
            rows[i] = _mm512_permutex2var_epi32(a, upper, b);
            rows[i + step] = _mm512_permutex2var_epi32(a, lower, b);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(out + i * TILE_COLUMNS, rows[i]);
}

// Words [depth / 2, TILE_COLUMNS] of up to TILE_COLUMNS columns of B, stored [depth, columns] or [columns, depth].
void pack_columns(const float* b, int64_t stride, bool transposed, int64_t depth, int64_t columns, uint32_t* out) {
    if (!transposed) {
        for (int64_t k = 0; k < depth; k += 2, b += 2 * stride, out += TILE_COLUMNS) {
            for (int64_t j = 0; j < TILE_COLUMNS; j += LANES) {
                const __m512 second = values(b + stride + j, k + 1 < depth ? columns - j : 0);
                _mm512_storeu_si512(out + j, paired(values(b + j, columns - j), second));
            }
        }
        return;
    }
    for (int64_t k = 0; k < depth; k += 2 * LANES, out += LANES * TILE_COLUMNS) {
        for (int64_t j = 0; j < TILE_COLUMNS; j += LANES) {
            __m512i rows[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const float* from = b + (j + i) * stride + k;
                const int64_t count = j + i < columns ? depth - k : 0;
                rows[i] = rounded(values(from, count), values(from + LANES, count - LANES));
            }
            write_transposed(rows, out + j);
        }
    }
}

// Words of up to TILE_ROWS rows of A: [rows, WORDS] of one that is stored [rows, depth], [depth / 2, TILE_ROWS] of one
// that is stored [depth, rows], of which `stored` are there.
void pack_rows(const float* a, int64_t stride, bool transposed, int64_t depth, int64_t rows, int64_t stored,
               uint32_t* out) {
    if (!transposed) {
        for (int64_t i = 0; i < rows; i++, a += stride, out += WORDS)
            for (int64_t k = 0; k < depth; k += 2 * LANES)
                _mm512_storeu_si512(out + k / 2,
                                    rounded(values(a + k, depth - k), values(a + k + LANES, depth - k - LANES)));
        return;
    }
    for (int64_t k = 0; k < depth; k += 2, a += 2 * stride, out += TILE_ROWS) {
        const __m512 second = values(a + stride, k + 1 < depth ? stored : 0);
        // Its last words are written again by the next.
        _mm512_storeu_si512(out, paired(values(a, stored), second));
    }
}

// A tile of C, of which ROWS are computed, and `rows` x `columns` are written or added to what is there.
template <bool TRANSPOSED, int ROWS>
void compute_tile(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                  int64_t columns, bool add) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < words; k++, b += TILE_COLUMNS) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(b), second = (__m512bh)_mm512_loadu_si512(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(int(TRANSPOSED ? a[k * TILE_ROWS + i] : a[i * WORDS + k]));
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], both, first);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], both, second);
        }
    }
    const __mmask16 first = columns >= LANES ? 0xffff : (1u << columns) - 1;
    const __mmask16 second = columns >= 2 * LANES ? 0xffff : columns > LANES ? (1u << (columns - LANES)) - 1 : 0;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        if (i >= rows) break;
        float* row = c + i * stride;
        if (add) {
            sums[i][0] = _mm512_add_ps(sums[i][0], _mm512_maskz_loadu_ps(first, row));
            sums[i][1] = _mm512_add_ps(sums[i][1], _mm512_maskz_loadu_ps(second, row + LANES));
        }
        _mm512_mask_storeu_ps(row, first, sums[i][0]);
        _mm512_mask_storeu_ps(row + LANES, second, sums[i][1]);
    }
}

template <bool TRANSPOSED>
void compute_rows(int64_t words, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                  int64_t columns, bool add) {
    const auto tile = rows > 8   ? compute_tile<TRANSPOSED, TILE_ROWS>
                      : rows > 4 ? compute_tile<TRANSPOSED, 8>
                      : rows > 2 ? compute_tile<TRANSPOSED, 4>
                                 : compute_tile<TRANSPOSED, 2>;
    tile(words, a, b, c, stride, rows, columns, add);
}

// product_of with operands rounded to bf16, which needs no sgemm.
void bf16_product_of(Sgemm, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                     int64_t stride_a, const float* b, int64_t stride_b, float beta, float* c, int64_t stride_c) {
    const bool add = beta != 0.0f;
    if (K == 0 && !add)
        for (int64_t m = 0; m < M; m++) std::memset(c + m * stride_c, 0, N * sizeof(float));
    for (int64_t k = 0; k < K; k += DEPTH) {
        const int64_t depth = least(DEPTH, K - k), words = (depth + 1) / 2;
        for (int64_t n = 0; n < N; n += BLOCK_COLUMNS) {
            const int64_t columns = least(BLOCK_COLUMNS, N - n);
            for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
                const float* from = transpose_b ? b + (n + j) * stride_b + k : b + k * stride_b + n + j;
                uint32_t* to = packed_columns + j * WORDS;
                pack_columns(from, stride_b, transpose_b, depth, least(TILE_COLUMNS, columns - j), to);
            }
            for (int64_t m = 0; m < M; m += BLOCK_ROWS) {
                const int64_t rows = least(BLOCK_ROWS, M - m);
                for (int64_t i = 0; i < rows; i += TILE_ROWS) {
                    const float* from = transpose_a ? a + k * stride_a + m + i : a + (m + i) * stride_a + k;
                    uint32_t* to = packed_rows + i * WORDS;
                    pack_rows(from, stride_a, transpose_a, depth, least(TILE_ROWS, rows - i), M - m - i, to);
                }
                for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
                    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
                        const auto tiles = transpose_a ? compute_rows<true> : compute_rows<false>;
                        tiles(words, packed_rows + i * WORDS, packed_columns + j * WORDS,
                              c + (m + i) * stride_c + n + j, stride_c, least(TILE_ROWS, rows - i),
                              least(TILE_COLUMNS, columns - j), add || k > 0);
                    }
            }
        }
    }
}

#endif

// Operands are rounded into blocks that a cache holds, and multiplied in fp32: the products of two numbers of bf16 are
// exact there.
constexpr int64_t BLOCK = 384;

// One call at a time rounds: its caller holds the interpreter's lock.
alignas(64) float rounded_a[BLOCK * BLOCK];
alignas(64) float rounded_b[BLOCK * BLOCK];

// to [rows, columns] = from [rows, columns] rounded to the nearest number of bf16, to the even one of two; NaN stays NaN.
void round_block(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
    for (int64_t i = 0; i < rows; i++, from += stride, to += columns) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            uint32_t bits;
            std::memcpy(&bits, from + j, 4);
            const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
            bits = from[j] == from[j] ? nearest : bits;
            std::memcpy(to + j, &bits, 4);
        }
    }
}

// product_of with operands rounded to bf16.
void rounded_product_of(Sgemm sgemm, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                        int64_t stride_a, const float* b, int64_t stride_b, float beta, float* c, int64_t stride_c) {
    if (K == 0 && beta == 0.0f)
        for (int64_t m = 0; m < M; m++) std::memset(c + m * stride_c, 0, N * sizeof(float));
    for (int64_t k = 0; k < K; k += BLOCK) {
        const int64_t depth = least(BLOCK, K - k);
        for (int64_t n = 0; n < N; n += BLOCK) {
            const int64_t columns = least(BLOCK, N - n), width_b = transpose_b ? depth : columns;
            round_block(transpose_b ? b + n * stride_b + k : b + k * stride_b + n, stride_b,
                        transpose_b ? columns : depth, width_b, rounded_b);
            for (int64_t m = 0; m < M; m += BLOCK) {
                const int64_t rows = least(BLOCK, M - m), width_a = transpose_a ? rows : depth;
                round_block(transpose_a ? a + k * stride_a + m : a + m * stride_a + k, stride_a,
                            transpose_a ? depth : rows, width_a, rounded_a);
                product_of(sgemm, transpose_a, transpose_b, rows, columns, depth, rounded_a, width_a, rounded_b, width_b,
                           k > 0 ? 1.0f : beta, c + m * stride_c + n, stride_c);
            }
        }
    }
}

using Product = void (*)(Sgemm, bool, bool, int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t,
                         float, float*, int64_t);

// The product by which operands are rounded: 0, not at all; 1, for the instruction where there is one; 2, for sgemm.
Product product_by(int64_t rounding) {
#ifdef __AVX512BF16__
    if (rounding == 1) return bf16_product_of;
#endif
    return rounding ? rounded_product_of : product_of;
}

// C [M, N] = beta * C + op(A) op(B), all dense.
void product(Sgemm sgemm, int64_t rounding, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K,
             const float* a, const float* b, float beta, float* c) {
    const auto multiply = product_by(rounding);
    multiply(sgemm, transpose_a, transpose_b, M, N, K, a, transpose_a ? M : K, b, transpose_b ? K : N, beta, c, N);
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

// Whether rounded_product needs no sgemm for rounding 1.
int64_t multiplies_bf16() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// C [M, N] = op(A) op(B), plus C if `add`, of operands that are rounded to bf16, with sums in fp32. A is stored [K, M]
// where it is transposed, B [N, K]; strides are those between their rows as stored.
void rounded_product(Sgemm sgemm, int64_t rounding, int64_t transpose_a, int64_t transpose_b, int64_t M, int64_t N,
                     int64_t K, const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t add,
                     float* c, int64_t stride_c) {
    const float beta = add ? 1.0f : 0.0f;
    product_by(rounding)(sgemm, transpose_a, transpose_b, M, N, K, a, stride_a, b, stride_b, beta, c, stride_c);
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
// scratch: 2 * largest block * (D + F). Products round their operands to bf16 as `rounding` says; nothing else does.
void experts_forward(Sgemm sgemm, int64_t rounding, const float* x, const float* gates, const float* fc1,
                     const float* fc2, const int64_t* rows, const int64_t* blocks, int64_t num_blocks, int64_t D,
                     int64_t F, float* hidden, float* output, float* scratch) {
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t expert = blocks[3 * b], first = blocks[3 * b + 1], count = blocks[3 * b + 2] - first;
        float *gathered = scratch, *active = gathered + count * D, *result = active + count * F;
        float* h = hidden + first * 2 * F;
        copy_rows(x, rows + first, count, D, gathered);
        product(sgemm, rounding, false, true, count, 2 * F, D, gathered, fc1 + expert * 2 * F * D, 0.0f, h);
        for (int64_t i = 0; i < count; i++) {
            const float *z = h + i * 2 * F, *up = z + F;
            const float gate = gates[first + i];
            float* a = active + i * F;
#pragma omp simd
            for (int64_t f = 0; f < F; f++) a[f] = z[f] * sigmoid(z[f]) * up[f] * gate;
        }
        product(sgemm, rounding, false, true, count, D, F, active, fc2 + expert * D * F, 0.0f, result);
        add_rows(result, rows + first, count, D, output);
    }
}

// Gradients of experts_forward. Those of the weights are added to what is there; d_x [T, D] begins as zeros.
// scratch: largest block * (3 D + 4 F).
void experts_backward(Sgemm sgemm, int64_t rounding, const float* d_output, const float* x, const float* gates,
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
        product(sgemm, rounding, false, false, count, F, D, d_out, fc2 + expert * D * F, 0.0f, d_active);
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
        product(sgemm, rounding, true, false, D, F, count, d_out, active, 1.0f, d_fc2 + expert * D * F);
        product(sgemm, rounding, true, false, 2 * F, D, count, d_hidden, gathered, 1.0f, d_fc1 + expert * 2 * F * D);
        product(sgemm, rounding, false, false, count, D, 2 * F, d_hidden, fc1 + expert * 2 * F * D, 0.0f, result);
        add_rows(result, rows + first, count, D, d_x);
    }
}

}  // extern "C"
