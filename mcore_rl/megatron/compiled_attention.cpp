// Causal attention for one thread, in tiles whose scores stay in the cache. mcore_rl/megatron/compiled.py builds and
// calls it. All is float32; exponentials are of base 2.
//
// A tile is LANES queries of a head, one in each lane of VECTORS vectors: a query's scores, maximum and sum lie in its
// lane. Products broadcast one operand and add to sums in registers in ascending order of keys, so that a query's
// result depends on its own keys alone, bit for bit, wherever its tile begins and whatever else is computed.
// Keys and values of a group are copied once, dense, for all its heads: in the caller's tensors they often lie a power
// of two apart and would share few sets of the cache.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

// ROWS * VECTORS registers hold sums: all but a few.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 4;
#else
constexpr int WIDTH = 4, ROWS = 8;
#endif
constexpr int VECTORS = 3, LANES = VECTORS * WIDTH;
constexpr int KEYS = 64;  // of a block, a multiple of ROWS
constexpr int COLUMNS = WIDTH > ROWS ? WIDTH : ROWS;  // heads are filled up to a multiple: tiles take ROWS at a time too
// attention.py counts so much memory for a tile.
static_assert(WIDTH <= 16 && LANES <= 48 && KEYS <= 64 && ROWS <= 8);
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef float Anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Anywhere*>(to) = x; }
inline Vector all(float x) { return x - Vector{}; }

// 2^x to 1 ulp for -125 <= x < 127: 2^n times a polynomial on |f| <= 1/2, the one with the least relative error that is
// exactly 1 at 0. What is less becomes 2^-125; NaN stays NaN, as the comparison is false for it.
inline Vector exponential(Vector x) {
    x = x < -125.0f ? all(-125.0f) : x;
    const Vector shifted = x + 12583039.0f;  // 1.5 * 2^23 + 127: the lowest bits are then round(x) + 127
    const Vector f = x - (shifted - 12583039.0f);
    Vector p = all(1.535336188e-4f);
    p = p * f + 1.339887440e-3f;
    p = p * f + 9.618437357e-3f;
    p = p * f + 5.550332548e-2f;
    p = p * f + 2.402264791e-1f;
    p = p * f + 6.931472028e-1f;
    p = p * f + 1.0f;
    return p * Vector(Integers(shifted) << 23);
}

// sums [R, N vectors] += A B with A [R, count] at steps of (a_row, a_step) and B [count, N vectors] at b_step.
template <int R, int N>
inline __attribute__((always_inline)) void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b,
                                                    int64_t b_step, int64_t count, Vector (&sums)[R][N]) {
    for (int64_t c = 0; c < count; c++, a += a_step, b += b_step) {
        Vector right[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) right[j] = load(b + j * WIDTH);
#if defined(__AVX__) && !defined(__AVX512F__)
        // Else the compiler reads them from memory for each row again, which takes longer than the sums: AVX2 reads twice
        // in a cycle.
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) asm("" : "+x"(right[j]));
#endif
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const Vector left = all(a[i * a_row]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
        }
    }
}

// out [ROWS, N vectors] = A B.
template <int N>
void product(const float* a, int64_t a_row, const float* b, int64_t b_step, int64_t count, float* out) {
    Vector sums[ROWS][N] = {};
    multiply<ROWS, N>(a, a_row, 1, b, b_step, count, sums);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(out + i * LANES + j * WIDTH, sums[i][j]);
}

// out [ROWS, N vectors] = factor * out + A B, factor one for each lane.
template <int N>
void add_product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t count,
                 const float* factor, float* out, int64_t out_row) {
    Vector sums[ROWS][N];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            sums[i][j] = load(out + i * out_row + j * WIDTH);
            if (factor) sums[i][j] *= load(factor + j * WIDTH);
        }
    multiply<ROWS, N>(a, a_row, a_step, b, b_step, count, sums);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(out + i * out_row + j * WIDTH, sums[i][j]);
}

// Lanes of a and b in the order of I: those of b follow those of a.
template <int... I>
inline Vector shuffled(Vector a, Vector b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, Integers{I...});
#endif
}

template <int S, int... L>
inline void exchange(Vector (&rows)[WIDTH], std::integer_sequence<int, L...>) {
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++)
        if (!(i & S)) {
            const Vector a = rows[i], b = rows[i + S];
            rows[i] = shuffled(a, b, std::integer_sequence<int, (L & S ? WIDTH + L - S : L)...>{});
            rows[i + S] = shuffled(a, b, std::integer_sequence<int, (L & S ? WIDTH + L : L + S)...>{});
        }
}

// Transposes in log2(WIDTH) steps: step S exchanges the blocks of size S beside the diagonal.
inline void transpose(Vector (&rows)[WIDTH]) {
    const std::make_integer_sequence<int, WIDTH> lanes;
    exchange<1>(rows, lanes);
    exchange<2>(rows, lanes);
    if constexpr (WIDTH > 4) exchange<4>(rows, lanes);
    if constexpr (WIDTH > 8) exchange<8>(rows, lanes);
}

// to [width, LANES] = from [count, width] * factor transposed; lanes behind count, and rows up to `padded`, are zeros.
void pack_lanes(const float* from, int64_t step, int64_t count, int64_t width, int64_t padded, float factor,
                float* to) {
    for (int64_t l = 0; l < LANES; l += WIDTH)
        for (int64_t d = 0; d < padded; d += WIDTH) {
            Vector rows[WIDTH];
            if (l + WIDTH <= count && d + WIDTH <= width) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) rows[i] = load(from + (l + i) * step + d) * factor;
            } else {
                for (int i = 0; i < WIDTH; i++)
                    for (int c = 0; c < WIDTH; c++)
                        rows[i][c] = l + i < count && d + c < width ? from[(l + i) * step + d + c] * factor : 0.0f;
            }
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) store(to + (d + i) * LANES + l, rows[i]);
        }
}

// to [count, width] at `step` = (from [width, LANES] * factor of each lane) transposed.
void unpack_lanes(const float* from, int64_t count, int64_t width, const float* factor, float* to, int64_t step) {
    for (int64_t l = 0; l < count; l += WIDTH)
        for (int64_t d = 0; d < width; d += WIDTH) {
            Vector rows[WIDTH];
            const Vector by = load(factor + l);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) rows[i] = load(from + (d + i) * LANES + l) * by;
            transpose(rows);
            if (l + WIDTH <= count && d + WIDTH <= width) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) store(to + (l + i) * step + d, rows[i]);
            } else {
                for (int i = 0; i < WIDTH && l + i < count; i++)
                    for (int c = 0; c < WIDTH && d + c < width; c++) to[(l + i) * step + d + c] = rows[i][c];
            }
        }
}

// to [rows, padded] = from [count, width] * factor, zeros behind.
void pack_rows(const float* from, int64_t step, int64_t count, int64_t width, int64_t rows, int64_t padded,
               float factor, float* to) {
    for (int64_t i = 0; i < rows; i++, to += padded) {
        const int64_t here = i < count ? width : 0;
        const float* row = from + i * step;
#pragma omp simd
        for (int64_t d = 0; d < here; d++) to[d] = row[d] * factor;
        for (int64_t d = here; d < padded; d++) to[d] = 0.0f;
    }
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

// Queries of a tile: `count` in `vectors` vectors, the first at position `position` of the keys.
struct Tile {
    int64_t position, count, vectors;
    // The first vector with a query that sees the key.
    int64_t first(int64_t key) const { return key <= position ? 0 : (key - position) / WIDTH; }
    // Keys that the last query sees.
    int64_t keys() const { return position + count; }
    // Distance from the key back to the queries of vector j; a query that is before the key has a negative one.
    Vector behind(int64_t key, int64_t j) const {
        Vector lanes;
        for (int l = 0; l < WIDTH; l++) lanes[l] = float(l);
        return lanes + float(position + j * WIDTH - key);
    }
};

Tile tile_at(int64_t first, int64_t count, int64_t keys) {
    const int64_t here = least(LANES, count - first);
    return {keys - count + first, here, rounded(here, WIDTH) / WIDTH};
}

// Calls f(N), N being the number of vectors as a constant.
template <class F>
inline void with_constant(int64_t vectors, F f) {
    switch (vectors) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        default: return f(std::integral_constant<int, 3>{});
    }
}

// A tensor [positions, rows, heads, width] of the caller, dense along its width alone: elements from one position, row
// and head to the next.
template <class Float>
struct Heads {
    Float* start;
    int64_t position, row, head;
    Heads(Float* start, const int64_t* steps) : start(start), position(steps[0]), row(steps[1]), head(steps[2]) {}
    Heads(Float* start, int64_t rows, int64_t heads, int64_t width)
        : start(start), position(rows * heads * width), row(heads * width), head(width) {}
    Float* at(int64_t p, int64_t r, int64_t h) const { return start + p * position + r * row + h * head; }
};

struct Sizes {
    int64_t rows, heads, groups, width, value_width;
    int64_t query[3], key[3], value[3], gradient[3];  // arguments of Heads
};

inline float dot(const float* a, const float* b, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < width; d++) sum += a[d] * b[d];
    return sum;
}

// out [keys from `begin` to `end`, LANES] = rows [keys, width] times lanes [width, LANES], where a query sees the key.
void block_products(const Tile& tile, int64_t begin, int64_t end, const float* rows, int64_t width, const float* lanes,
                    float* out) {
    for (int64_t k = begin; k < end; k += ROWS) {
        const int64_t j = tile.first(k);
        with_constant(tile.vectors - j, [&](auto n) {
            product<n()>(rows + k * width, width, lanes + j * WIDTH, LANES, width,
                         out + (k - begin) * LANES + j * WIDTH);
        });
    }
}

// sums [width, LANES] = factor * sums + (rows [keys, width])^T weights [keys, LANES].
void add_weighted(const Tile& tile, int64_t begin, int64_t end, const float* rows, int64_t width, const float* weights,
                  const float* factor, float* sums) {
    // A step has the keys that vectors j and up see; factors of those below are 1, as they see no key of the block.
    for (int64_t j = tile.first(begin), k = begin; k < end; j++) {
        const int64_t next = least(tile.position + (j + 1) * WIDTH, end);
        with_constant(tile.vectors - j, [&](auto n) {
            for (int64_t d = 0; d < width; d += ROWS)
                add_product<n()>(rows + k * width + d, 1, width, weights + (k - begin) * LANES + j * WIDTH, LANES,
                                 next - k, factor ? factor + j * WIDTH : nullptr, sums + d * LANES + j * WIDTH,
                                 LANES);
        });
        k = next;
        factor = nullptr;
    }
}

// sums [keys, width] += weights [keys, LANES] rows [queries of the tile, width].
void add_transposed(const Tile& tile, int64_t begin, int64_t end, const float* weights, const float* rows,
                    int64_t width, float* sums) {
    for (int64_t k = begin; k < end; k += ROWS) {
        const int64_t first = most(0, k - tile.position), count = tile.count - first;
        const float* from = weights + (k - begin) * LANES + first;
        int64_t d = 0;
        for (; d + 2 * WIDTH <= width; d += 2 * WIDTH)
            add_product<2>(from, LANES, 1, rows + first * width + d, width, count, nullptr, sums + k * width + d,
                           width);
        if (d < width)
            add_product<1>(from, LANES, 1, rows + first * width + d, width, count, nullptr, sums + k * width + d,
                           width);
    }
}

// Turns the scores of a block into weights, of base 2 and relative to the new highest score; `factor` is what the sums
// of earlier blocks are to be multiplied by. All have a number for each lane.
void softmax_block(const Tile& tile, int64_t begin, int64_t end, float* scores, float* highest, float* factor,
                   float* sum) {
    for (int j = 0; j < tile.vectors; j++) {
        const int64_t last = least(end, tile.position + (j + 1) * WIDTH);  // behind the last key that it sees
        const int64_t diagonal = most(begin, least(last, tile.position + j * WIDTH + 1));
        float* column = scores + j * WIDTH;
        const Vector before = load(highest + j * WIDTH);
        Vector now = before, other = before;
        int64_t k = begin;
        for (; k + 2 <= diagonal; k += 2) {
            const Vector a = load(column + (k - begin) * LANES), b = load(column + (k + 1 - begin) * LANES);
            now = a > now ? a : now;
            other = b > other ? b : other;
        }
        for (; k < diagonal; k++) {
            const Vector a = load(column + (k - begin) * LANES);
            now = a > now ? a : now;
        }
        now = other > now ? other : now;
        for (; k < last; k++) {
            const Vector a = load(column + (k - begin) * LANES);
            now = ((tile.behind(k, j) >= 0.0f) & (a > now)) ? a : now;
        }
        const Vector rescale = exponential(before - now);
        store(highest + j * WIDTH, now);
        store(factor + j * WIDTH, rescale);
        Vector total = load(sum + j * WIDTH) * rescale;
#pragma GCC unroll 4
        for (k = begin; k < diagonal; k++) {
            const Vector weight = exponential(load(column + (k - begin) * LANES) - now);
            total += weight;
            store(column + (k - begin) * LANES, weight);
        }
        for (; k < last; k++) {
            Vector weight = exponential(load(column + (k - begin) * LANES) - now);
            weight = tile.behind(k, j) >= 0.0f ? weight : Vector{};
            total += weight;
            store(column + (k - begin) * LANES, weight);
        }
        store(sum + j * WIDTH, total);
    }
}

// Turns scores into weights, and gradients of weights into those of scores; delta is the sum of weights times theirs.
void gradient_block(const Tile& tile, int64_t begin, int64_t end, float* scores, float* gradients, const float* lse,
                    const float* delta) {
    for (int j = 0; j < tile.vectors; j++) {
        const int64_t last = least(rounded(end - begin, ROWS) + begin, tile.position + (j + 1) * WIDTH + ROWS);
        const int64_t diagonal = most(begin, least(last, tile.position + j * WIDTH + 1));
        float *column = scores + j * WIDTH, *gradient = gradients + j * WIDTH;
        const Vector minus = load(lse + j * WIDTH), d = load(delta + j * WIDTH);
#pragma GCC unroll 4
        for (int64_t k = begin; k < diagonal; k++) {
            const int64_t at = (k - begin) * LANES;
            const Vector weight = exponential(load(column + at) - minus);
            store(column + at, weight);
            store(gradient + at, weight * (load(gradient + at) - d));
        }
        for (int64_t k = diagonal; k < last; k++) {
            const int64_t at = (k - begin) * LANES;
            const auto seen = tile.behind(k, j) >= 0.0f;
            const Vector weight = exponential(load(column + at) - minus);
            store(column + at, seen ? weight : Vector{});
            store(gradient + at, seen ? weight * (load(gradient + at) - d) : Vector{});
        }
    }
}

}  // namespace

extern "C" {

// Output [positions, rows, heads, value_width] of queries [positions, rows, heads, width] over keys [.., groups, width]
// and values [.., groups, value_width], and the log-sum-exp of their scores [rows, heads, positions]. Sequence i has
// positions bounds[i] to bounds[i + 1] of the queries and those of key_bounds of the keys, at the last of which its
// queries are. scratch: (most keys of a sequence + 8) * (D + V) + 48 * (D + V) + 67 * 48, D and V being the widths
// rounded up to 16.
void attention_forward(const float* query, const float* key, const float* value, const int64_t* bounds,
                       const int64_t* key_bounds, int64_t sequences, const int64_t* sizes, float scale, float* output,
                       float* lse, float* scratch) {
    const Sizes& z = *reinterpret_cast<const Sizes*>(sizes);
    const int64_t D = rounded(z.width, COLUMNS), V = rounded(z.value_width, COLUMNS), shared = z.heads / z.groups;
    const Heads<const float> q(query, z.query), k(key, z.key), v(value, z.value);
    const Heads<float> out(output, z.rows, z.heads, z.value_width);
    float *q_lanes = scratch, *mixed = q_lanes + D * LANES, *scores = mixed + V * LANES;
    float *highest = scores + KEYS * LANES, *factor = highest + LANES, *sum = factor + LANES, *k_rows = sum + LANES;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t first = bounds[s], count = bounds[s + 1] - first;
        const int64_t first_key = key_bounds[s], keys = key_bounds[s + 1] - first_key, padded = rounded(keys, ROWS);
        float* v_rows = k_rows + padded * D;
        for (int64_t pair = 0; pair < z.rows * z.groups; pair++) {
            const int64_t r = pair / z.groups, g = pair % z.groups;
            pack_rows(k.at(first_key, r, g), k.position, keys, z.width, padded, D, 1.0f, k_rows);
            pack_rows(v.at(first_key, r, g), v.position, keys, z.value_width, padded, V, 1.0f, v_rows);
            for (int64_t h = g * shared; h < (g + 1) * shared; h++)
                for (int64_t t = 0; t < count; t += LANES) {
                    const Tile tile = tile_at(t, count, keys);
                    pack_lanes(q.at(first + t, r, h), q.position, tile.count, z.width, D, scale * LOG2_E, q_lanes);
                    std::memset(mixed, 0, V * LANES * sizeof(float));
                    for (int l = 0; l < LANES; l++) highest[l] = -INFINITY, sum[l] = 0.0f;
                    for (int64_t begin = 0; begin < tile.keys(); begin += KEYS) {
                        const int64_t end = least(begin + KEYS, tile.keys());
                        block_products(tile, begin, end, k_rows, D, q_lanes, scores);
                        softmax_block(tile, begin, end, scores, highest, factor, sum);
                        add_weighted(tile, begin, end, v_rows, V, scores, factor, mixed);
                    }
                    float* logs = lse + (r * z.heads + h) * bounds[sequences] + first + t;
                    for (int l = 0; l < tile.count; l++) logs[l] = (highest[l] + std::log2(sum[l])) * LN_2;
                    for (int l = 0; l < LANES; l++) factor[l] = 1.0f / sum[l];
                    unpack_lanes(mixed, tile.count, z.value_width, factor, out.at(first + t, r, h), out.position);
                }
        }
    }
}

// Gradients of attention_forward, which gave output and lse; they are contiguous. Weights are computed again.
// scratch: 2 * (most keys of a sequence + 8) * (D + V) + 48 * (3 * D + 2 * V) + 131 * 48.
void attention_backward(const float* gradient, const float* query, const float* key, const float* value,
                        const float* output, const float* lse, const int64_t* bounds, const int64_t* key_bounds,
                        int64_t sequences, const int64_t* sizes, float scale, float* d_query, float* d_key,
                        float* d_value, float* scratch) {
    const Sizes& z = *reinterpret_cast<const Sizes*>(sizes);
    const int64_t D = rounded(z.width, COLUMNS), V = rounded(z.value_width, COLUMNS), shared = z.heads / z.groups;
    const Heads<const float> q(query, z.query), k(key, z.key), v(value, z.value), d_out(gradient, z.gradient);
    const Heads<const float> out(output, z.rows, z.heads, z.value_width);
    const Heads<float> dq(d_query, z.rows, z.heads, z.width), dk(d_key, z.rows, z.groups, z.width);
    const Heads<float> dv(d_value, z.rows, z.groups, z.value_width);
    float *q_lanes = scratch, *dq_lanes = q_lanes + D * LANES, *q_rows = dq_lanes + D * LANES;
    float *g_lanes = q_rows + D * LANES, *g_rows = g_lanes + V * LANES, *scores = g_rows + V * LANES;
    float *d_scores = scores + KEYS * LANES, *logs = d_scores + KEYS * LANES, *delta = logs + LANES;
    float *factor = delta + LANES, *k_rows = factor + LANES;
    for (int l = 0; l < LANES; l++) factor[l] = scale;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t first = bounds[s], count = bounds[s + 1] - first;
        const int64_t first_key = key_bounds[s], keys = key_bounds[s + 1] - first_key, padded = rounded(keys, ROWS);
        float *v_rows = k_rows + padded * D, *dk_rows = v_rows + padded * V, *dv_rows = dk_rows + padded * D;
        for (int64_t pair = 0; pair < z.rows * z.groups; pair++) {
            const int64_t r = pair / z.groups, g = pair % z.groups;
            pack_rows(k.at(first_key, r, g), k.position, keys, z.width, padded, D, 1.0f, k_rows);
            pack_rows(v.at(first_key, r, g), v.position, keys, z.value_width, padded, V, 1.0f, v_rows);
            std::memset(dk_rows, 0, padded * (D + V) * sizeof(float));
            for (int64_t h = g * shared; h < (g + 1) * shared; h++)
                for (int64_t t = 0; t < count; t += LANES) {
                    const Tile tile = tile_at(t, count, keys);
                    const float *queries = q.at(first + t, r, h), *wanted = d_out.at(first + t, r, h);
                    pack_lanes(queries, q.position, tile.count, z.width, D, scale * LOG2_E, q_lanes);
                    pack_rows(queries, q.position, tile.count, z.width, tile.count, D, scale, q_rows);
                    pack_lanes(wanted, d_out.position, tile.count, z.value_width, V, 1.0f, g_lanes);
                    pack_rows(wanted, d_out.position, tile.count, z.value_width, tile.count, V, 1.0f, g_rows);
                    const float* natural = lse + (r * z.heads + h) * bounds[sequences] + first + t;
                    for (int64_t l = 0; l < LANES; l++) {
                        // Lanes behind the last query have zeros for query and gradient, which add nothing.
                        logs[l] = l < tile.count ? natural[l] * LOG2_E : 0.0f;
                        const float* mixed = out.at(first + t, r, h) + l * out.position;
                        delta[l] = l < tile.count ? dot(g_rows + l * V, mixed, z.value_width) : 0.0f;
                    }
                    std::memset(dq_lanes, 0, D * LANES * sizeof(float));
                    for (int64_t begin = 0; begin < tile.keys(); begin += KEYS) {
                        const int64_t end = least(begin + KEYS, tile.keys());
                        block_products(tile, begin, end, k_rows, D, q_lanes, scores);
                        block_products(tile, begin, end, v_rows, V, g_lanes, d_scores);
                        gradient_block(tile, begin, end, scores, d_scores, logs, delta);
                        add_weighted(tile, begin, end, k_rows, D, d_scores, nullptr, dq_lanes);
                        add_transposed(tile, begin, end, scores, g_rows, V, dv_rows);
                        add_transposed(tile, begin, end, d_scores, q_rows, D, dk_rows);
                    }
                    unpack_lanes(dq_lanes, tile.count, z.width, factor, dq.at(first + t, r, h), dq.position);
                }
            for (int64_t i = 0; i < keys; i++) {
                std::memcpy(dk.at(first_key + i, r, g), dk_rows + i * D, z.width * sizeof(float));
                std::memcpy(dv.at(first_key + i, r, g), dv_rows + i * V, z.value_width * sizeof(float));
            }
        }
    }
}

}  // extern "C"
