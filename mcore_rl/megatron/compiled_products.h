// Matrix products of the compiled layers, for one thread. All matrices are row-major, float32. Included by compiled.cpp.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
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

// rows[i][j] = rows[j][i].
inline void transpose(__m512i* rows) {
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
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) _mm512_storeu_si512(out + i * TILE_COLUMNS + j, rows[i]);
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

#ifdef __AMX_BF16__

// The same by AMX: one instruction multiplies two tiles of a KiB, 16 rows of A and 16 columns of B along 32 positions of
// the summed axis, and adds to the 16 x 16 sums of a third.
constexpr int64_t AMX_DEPTH = 32, AMX_WORDS = LANES * LANES;
constexpr int64_t PANEL = 512, PANEL_STEPS = PANEL / AMX_DEPTH;

alignas(64) uint32_t panel_a[PANEL * PANEL / 2];
alignas(64) uint32_t panel_b[PANEL * PANEL / 2];

// Linux asks a process to request the state of the tiles, which threads and children inherit.
const bool has_amx = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;

struct alignas(64) TileShapes {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A tile's words from up to LANES lines of a matrix and up to AMX_DEPTH positions of the summed axis, which is that of
// memory if `along`. Tiles of A have a row for each line, those of B a column.
template <bool COLUMNS>
void pack_tile(const float* from, int64_t stride, bool along, int64_t lines, int64_t depth, uint32_t* out) {
    __m512i words[LANES];
    for (int64_t i = 0; i < LANES; i++) {
        if (along) {
            const float* line = from + i * stride;
            const int64_t count = i < lines ? depth : 0;
            words[i] = rounded(values(line, count), values(line + LANES, count - LANES));
        } else {
            const float* pair = from + 2 * i * stride;
            words[i] = paired(values(pair, 2 * i < depth ? lines : 0),
                              values(pair + stride, 2 * i + 1 < depth ? lines : 0));
        }
    }
    if (along == COLUMNS) transpose(words);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) _mm512_store_si512(out + i * LANES, words[i]);
}

// Tiles [lines / LANES, PANEL_STEPS] of a part of a matrix that begins at `from`.
template <bool COLUMNS>
void pack_panel(const float* from, int64_t stride, bool along, int64_t lines, int64_t depth, uint32_t* out) {
    const int64_t line_stride = along ? stride : 1, depth_stride = along ? 1 : stride;
    for (int64_t i = 0; i < lines; i += LANES)
        for (int64_t k = 0; k < depth; k += AMX_DEPTH)
            pack_tile<COLUMNS>(from + i * line_stride + k * depth_stride, stride, along, least(LANES, lines - i),
                               least(AMX_DEPTH, depth - k),
                               out + (i / LANES * PANEL_STEPS + k / AMX_DEPTH) * AMX_WORDS);
}

// C [16 ROWS, 16 COLUMNS] of ROWS and COLUMNS tiles, added to what is there if `add`.
template <int ROWS, int COLUMNS>
void multiply_tiles(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, bool add) {
    constexpr int64_t NEXT = PANEL_STEPS * AMX_WORDS;
    float *right = c + LANES, *below = c + LANES * stride, *across = below + LANES;
    const int64_t bytes = stride * sizeof(float);
    _tile_zero(0);
    if (COLUMNS > 1) _tile_zero(1);
    if (ROWS > 1) _tile_zero(2);
    if (ROWS > 1 && COLUMNS > 1) _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, bytes);
        if (COLUMNS > 1) _tile_loadd(1, right, bytes);
        if (ROWS > 1) _tile_loadd(2, below, bytes);
        if (ROWS > 1 && COLUMNS > 1) _tile_loadd(3, across, bytes);
    }
    for (int64_t k = 0; k < steps; k++, a += AMX_WORDS, b += AMX_WORDS) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (COLUMNS > 1) _tile_loadd(7, b + NEXT, 64);
        if (COLUMNS > 1) _tile_dpbf16ps(1, 4, 7);
        if (ROWS > 1) _tile_loadd(5, a + NEXT, 64);
        if (ROWS > 1) _tile_dpbf16ps(2, 5, 6);
        if (ROWS > 1 && COLUMNS > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, bytes);
    if (COLUMNS > 1) _tile_stored(1, right, bytes);
    if (ROWS > 1) _tile_stored(2, below, bytes);
    if (ROWS > 1 && COLUMNS > 1) _tile_stored(3, across, bytes);
}

// Up to two by two tiles of C; a part of a tile is computed beside C, whose neighbours belong to others.
void multiply_block(int64_t steps, const uint32_t* a, const uint32_t* b, float* c, int64_t stride, int64_t rows,
                    int64_t columns, bool add) {
    const auto multiply = rows > LANES ? columns > LANES ? multiply_tiles<2, 2> : multiply_tiles<2, 1>
                          : columns > LANES ? multiply_tiles<1, 2>
                                            : multiply_tiles<1, 1>;
    if (rows % LANES == 0 && columns % LANES == 0) return multiply(steps, a, b, c, stride, add);
    alignas(64) float whole[4 * AMX_WORDS];
    constexpr int64_t width = 2 * LANES;
    if (add)
        for (int64_t i = 0; i < rows; i++) std::memcpy(whole + i * width, c + i * stride, columns * sizeof(float));
    // The compiler does not see that tiles are read from and written to memory.
    __asm__ volatile("" ::: "memory");
    multiply(steps, a, b, whole, width, add);
    __asm__ volatile("" ::: "memory");
    for (int64_t i = 0; i < rows; i++) std::memcpy(c + i * stride, whole + i * width, columns * sizeof(float));
}

void amx_product_of(bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                    int64_t stride_a, const float* b, int64_t stride_b, bool add, float* c, int64_t stride_c) {
    static const TileShapes shapes;  // static, since compilers take the instruction to read its first word alone
    _tile_loadconfig(&shapes);
    for (int64_t k = 0; k < K; k += PANEL) {
        const int64_t depth = least(PANEL, K - k), steps = (depth + AMX_DEPTH - 1) / AMX_DEPTH;
        for (int64_t n = 0; n < N; n += PANEL) {
            const int64_t columns = least(PANEL, N - n);
            pack_panel<true>(transpose_b ? b + n * stride_b + k : b + k * stride_b + n, stride_b, transpose_b, columns,
                             depth, panel_b);
            for (int64_t m = 0; m < M; m += PANEL) {
                const int64_t rows = least(PANEL, M - m);
                pack_panel<false>(transpose_a ? a + k * stride_a + m : a + m * stride_a + k, stride_a, !transpose_a,
                                  rows, depth, panel_a);
                __asm__ volatile("" ::: "memory");
                for (int64_t j = 0; j < columns; j += 2 * LANES)
                    for (int64_t i = 0; i < rows; i += 2 * LANES)
                        multiply_block(steps, panel_a + i * PANEL / 2, panel_b + j * PANEL / 2,
                                       c + (m + i) * stride_c + n + j, stride_c, least(2 * LANES, rows - i),
                                       least(2 * LANES, columns - j), add || k > 0);
                __asm__ volatile("" ::: "memory");
            }
        }
    }
    _tile_release();
}

#endif

// product_of with operands rounded to bf16, which needs no sgemm.
void bf16_product_of(Sgemm, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                     int64_t stride_a, const float* b, int64_t stride_b, float beta, float* c, int64_t stride_c) {
    const bool add = beta != 0.0f;
    if (K == 0 && !add)
        for (int64_t m = 0; m < M; m++) std::memset(c + m * stride_c, 0, N * sizeof(float));
#ifdef __AMX_BF16__
    if (has_amx)
        return amx_product_of(transpose_a, transpose_b, M, N, K, a, stride_a, b, stride_b, add, c, stride_c);
#endif
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

// The product of operands that are rounded, or not. Without AMX Intel's instruction for bf16 is slower than products in
// fp32, and AMD's is faster.
Product product_by(bool rounds) {
    if (!rounds) return product_of;
#ifdef __AVX512BF16__
#ifdef __AMX_BF16__
    if (has_amx) return bf16_product_of;
#endif
    if (__builtin_cpu_is("amd")) return bf16_product_of;
#endif
    return rounded_product_of;
}

// C [M, N] = beta * C + op(A) op(B), all dense.
void product(Sgemm sgemm, bool rounds, bool transpose_a, bool transpose_b, int64_t M, int64_t N, int64_t K,
             const float* a, const float* b, float beta, float* c) {
    const auto multiply = product_by(rounds);
    multiply(sgemm, transpose_a, transpose_b, M, N, K, a, transpose_a ? M : K, b, transpose_b ? K : N, beta, c, N);
}

}  // namespace
