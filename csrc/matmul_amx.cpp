// Products on tiles (AMX-BF16): bfloat16 activations, 16 rows of them and more, weights of at most 16 bits. Everything
// else is done by the avx512_bf16 version, whose decoding is used here too.
//
// Sixteen pairs of columns of a panel are a tile as they lie: 16 lines of 16 rows' pairs of bfloat16, the second
// operand of TDPBF16PS (Intel SDM volume 2; volume 1, chapter 18). Other formats are decoded into that form, once for all
// rows of a call. Products of a row are added in another order than by the other versions: its last bits depend on
// whether it came with 15 others.
#define FT_BF16 1
#define FT_ARITHMETIC_ONLY
#include "matmul_avx512.inl"

namespace ft {
namespace {

constexpr int64_t LEAST_ROWS = 16;       // of activations that make tiles worth their setting up
constexpr int64_t TILE = 16;             // lines of a tile, each of 64 bytes
constexpr int64_t STEP = 32;             // columns of one tile
constexpr int64_t TILE_BYTES = TILE * 64;
constexpr int64_t BLOCK = 2 * TILE;      // activation rows of one pass
constexpr int64_t PANELS = 2;            // of one pass

// Tiles 0 to 3 are sums (row tile, panel), 4 and 5 activations, 6 and 7 weights, all of full size.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles of the calling thread, in their initial state again at the end: others, such as oneDNN, set them up for
// themselves, and the operating system saves none that are not in use.
class Tiles {
public:
    Tiles() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// GCC does not know that tile loads read memory.
FT_INLINE void written() { __asm__ volatile("" ::: "memory"); }

// Memory that a thread keeps.
class Buffer {
public:
    ~Buffer() { _mm_free(data_); }

    uint8_t *data() const { return data_; }

    // False: there is none.
    bool reserve(int64_t bytes) {
        if (bytes <= size_) return true;
        _mm_free(data_);
        data_ = static_cast<uint8_t *>(_mm_malloc(size_t(bytes), 4096));
        size_ = data_ == nullptr ? 0 : bytes;
        return data_ != nullptr;
    }

private:
    uint8_t *data_ = nullptr;
    int64_t size_ = 0;
};

thread_local Buffer decoded_panels, copied_rows;

constexpr int64_t filled_up(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

bool reserve(int64_t rows, int64_t width) {
    return decoded_panels.reserve(PANELS * width / STEP * TILE_BYTES) && copied_rows.reserve(filled_up(rows) * 2 * width);
}

// Scales that a code's bfloat16 takes in exactly: a product of e2m1 and e4m3 or a power of two has 8 bits at most.
template <Format F>
constexpr bool SCALED_CODES = F == Format::nvfp4 || F == Format::mxfp4;

// Columns that are summed before a scale is applied.
template <Format F>
constexpr int SUMMED = SCALED_CODES<F> ? 0 : GROUP<F>;

FT_INLINE Halves scaled(Halves codes, Sum scale) {
    const Floats both = split(codes);
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(both.even, scale)), 16);
    const __m512i odd = _mm512_castps_si512(_mm512_mul_ps(both.odd, scale));
    return _mm512_mask_mov_epi16(odd, 0x55555555, even);
}

template <Format F, int I, class Loaded>
FT_INLINE void store_pairs(uint8_t *to, const Loaded &loaded, Sum scale) {
    Halves halves = pair<F, uint16_t, I>(loaded);
    if constexpr (SCALED_CODES<F>) halves = scaled(halves, scale);
    _mm512_store_si512(to + 64 * I, halves);
    if constexpr (2 * I + 2 < CODE_COLUMNS<F>) store_pairs<F, I + 1>(to, loaded, scale);
}

// A panel as tiles, one after the other.
template <Format F>
const uint8_t *as_tiles(const uint8_t *panel, int64_t width, uint8_t *to) {
    if constexpr (F == Format::bf16) return panel;
    const uint8_t *scales = panel + width * COLUMN_BYTES<F>;
    Sum scale = zero();
    for (int64_t k = 0; k < width; k += CODE_COLUMNS<F>) {
        if constexpr (SCALED_CODES<F>)
            if (k % GROUP<F> == 0) scale = group_scale<F>(scales, k);
        store_pairs<F, 0>(to + k / 2 * 64, load<F, uint16_t>(panel + k * COLUMN_BYTES<F>), scale);
    }
    return to;
}

// Activations of whole tiles.
struct RowTiles {
    const uint8_t *data;
    int64_t stride;  // bytes from row to row

    RowTiles from(int64_t row) const { return {data + row * stride, stride}; }
};

// Rows as they lie if they are equally far apart and fill their tiles, else copied, with zeros behind them.
RowTiles row_tiles(const void *const *x, int64_t rows, int64_t width) {
    const uint8_t *first = static_cast<const uint8_t *>(x[0]);
    const int64_t stride = static_cast<const uint8_t *>(x[1]) - first, bytes = 2 * width;
    bool even = rows == filled_up(rows);
    for (int64_t i = 0; i < rows && even; ++i) even = static_cast<const uint8_t *>(x[i]) == first + i * stride;
    if (even) return {first, stride};
    uint8_t *to = copied_rows.data();
    for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(to + i * bytes, x[i], size_t(bytes));
    __builtin_memset(to + rows * bytes, 0, size_t((filled_up(rows) - rows) * bytes));
    return {to, bytes};
}

// Sums of a pass: [row][panel][row of the panel].
struct alignas(64) Sums {
    float value[BLOCK][PANELS][PANEL_ROWS];

    uint8_t *tile(int64_t rows, int64_t panel) { return reinterpret_cast<uint8_t *>(value[rows * TILE][panel]); }
};
constexpr int64_t SUMS_STRIDE = PANELS * PANEL_ROWS * 4;

template <int M, int N>
FT_INLINE void clear_tiles() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (M > 1) _tile_zero(2);
    if constexpr (M > 1 && N > 1) _tile_zero(3);
}

// Adds the products of columns [begin, end) to the tiles.
template <int M, int N>
FT_INLINE void multiply_tiles(const uint8_t *const (&weights)[PANELS], const RowTiles &x, int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += STEP) {
        const uint8_t *rows = x.data + 2 * k;
        const int64_t at = k / STEP * TILE_BYTES;
        _tile_loadd(6, weights[0] + at, 64);
        _tile_loadd(4, rows, x.stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            _tile_loadd(7, weights[1] + at, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (M > 1) {
            _tile_loadd(5, rows + TILE * x.stride, x.stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

template <int M, int N>
FT_INLINE void store_tiles(Sums &to) {
    _tile_stored(0, to.tile(0, 0), SUMS_STRIDE);
    if constexpr (N > 1) _tile_stored(1, to.tile(0, 1), SUMS_STRIDE);
    if constexpr (M > 1) _tile_stored(2, to.tile(1, 0), SUMS_STRIDE);
    if constexpr (M > 1 && N > 1) _tile_stored(3, to.tile(1, 1), SUMS_STRIDE);
}

// M tiles of rows times N panels. weights: as tiles; panels: where the scales are.
template <Format F, int M, int N>
void pass(const uint8_t *const (&weights)[PANELS], const uint8_t *const (&panels)[PANELS], const RowTiles &x,
          int64_t width, Sums &sums) {
    const auto each_sum = [&](auto &&change) FT_INLINE_LAMBDA {
        for (int64_t n = 0; n < N; ++n)
            for (int64_t m = 0; m < M * TILE; ++m) change(n, m);
    };
    if constexpr (SUMMED<F> == 0) {
        clear_tiles<M, N>();
        multiply_tiles<M, N>(weights, x, 0, width);
        store_tiles<M, N>(sums);
    } else {
        Sums group;
        each_sum([&](int64_t n, int64_t m) FT_INLINE_LAMBDA { store(sums.value[m][n], zero()); });
        for (int64_t k = 0; k < width; k += SUMMED<F>) {
            const int64_t end = k + SUMMED<F> < width ? k + SUMMED<F> : width;
            clear_tiles<M, N>();
            multiply_tiles<M, N>(weights, x, k, end);
            store_tiles<M, N>(group);
            Sum scale[PANELS];
            for (int64_t n = 0; n < N; ++n) scale[n] = group_scale<F>(panels[n] + width * COLUMN_BYTES<F>, k);
            each_sum([&](int64_t n, int64_t m) FT_INLINE_LAMBDA {
                const Sum part = _mm512_load_ps(group.value[m][n]);
                store(sums.value[m][n], multiply_add(part, scale[n], _mm512_load_ps(sums.value[m][n])));
            });
        }
    }
    if constexpr (ROW_SCALED<F>) {
        Sum scale[PANELS];
        for (int64_t n = 0; n < N; ++n) scale[n] = row_scale<F>(panels[n] + width * COLUMN_BYTES<F>, width);
        each_sum([&](int64_t n, int64_t m) FT_INLINE_LAMBDA {
            store(sums.value[m][n], times(_mm512_load_ps(sums.value[m][n]), scale[n]));
        });
    }
}

// Calls use(first row, rows, sums) for every block of rows, for the `count` panels (one or two) from `panel` on.
template <Format F, class Use>
FT_INLINE void panel_pair(const Packed &w, int64_t panel, int64_t count, const RowTiles &x, int64_t rows, Use &&use) {
    const int64_t width = padded(w.columns);
    const uint8_t *panels[PANELS] = {}, *weights[PANELS] = {};
    for (int64_t n = 0; n < count; ++n) {
        panels[n] = w.panel(panel + n);
        weights[n] = as_tiles<F>(panels[n], width, decoded_panels.data() + n * (width / STEP) * TILE_BYTES);
    }
    written();
    Sums sums;
    for (int64_t t = 0; t < rows; t += BLOCK) {
        const int64_t block = rows - t < BLOCK ? rows - t : BLOCK;
        const RowTiles in = x.from(t);
        if (block > TILE)
            count > 1 ? pass<F, 2, 2>(weights, panels, in, width, sums) : pass<F, 2, 1>(weights, panels, in, width, sums);
        else
            count > 1 ? pass<F, 1, 2>(weights, panels, in, width, sums) : pass<F, 1, 1>(weights, panels, in, width, sums);
        use(t, block, sums);
    }
}

template <Format F>
void tile_panels(const Packed &w, int64_t first, int64_t last, const void *const *rows, int64_t count,
                 float *const *out) {
    const Tiles tiles;
    const RowTiles x = row_tiles(rows, count, padded(w.columns));
    for (int64_t i = first; i < last; i += PANELS) {
        const int64_t panels = last - i < PANELS ? last - i : PANELS, at = (i - first) * PANEL_ROWS;
        panel_pair<F>(w, i, panels, x, count, [&](int64_t t, int64_t block, const Sums &sums) {
            for (int64_t m = 0; m < block; ++m)
                for (int64_t n = 0; n < panels; ++n)
                    store(out[t + m] + at + n * PANEL_ROWS, _mm512_load_ps(sums.value[m][n]));
        });
    }
}

template <Format F>
void tile_gated(const Packed &w, int64_t first, int64_t last, const void *const *rows, int64_t count,
                const GatedUnit &unit, void *const *act) {
    const Tiles tiles;
    const RowTiles x = row_tiles(rows, count, padded(w.columns));
    for (int64_t i = first; i < last; ++i) {
        const int64_t row = i * PANEL_ROWS, at = (i - first) * PANEL_ROWS;
        panel_pair<F>(w, 2 * i, 2, x, count, [&](int64_t t, int64_t block, const Sums &sums) {
            for (int64_t m = 0; m < block; ++m) {
                const Sum gate = _mm512_load_ps(sums.value[m][0]), up = _mm512_load_ps(sums.value[m][1]);
                store_activation(static_cast<uint16_t *>(act[t + m]) + at,
                                 gated_product(unit, row, w.rows - row, gate, up));
            }
        });
    }
}

bool takes(const Packed &w, Activation type, int64_t rows) {
    const bool dot = type == Activation::bf16 && w.format != Format::f32 && w.format != Format::f16;
    return dot && rows >= LEAST_ROWS && reserve(rows, padded(w.columns));
}

// Calls CALL(F) for the format.
#define FT_BY_TILE_FORMAT(format, CALL)                             \
    switch (format) {                                               \
        case Format::bf16: CALL(Format::bf16); break;               \
        case Format::fp8: CALL(Format::fp8); break;                 \
        case Format::fp8_block: CALL(Format::fp8_block); break;     \
        case Format::nvfp4: CALL(Format::nvfp4); break;             \
        case Format::mxfp4: CALL(Format::mxfp4); break;             \
        case Format::q8_0: CALL(Format::q8_0); break;               \
        case Format::q4_0: CALL(Format::q4_0); break;               \
        case Format::f32:                                           \
        case Format::f16: break;                                    \
    }

void panels_amx(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
                float *const *out) {
    if (!takes(w, type, count)) return matmul_avx512_bf16.panels(w, first, last, type, x, count, out);
#define FT_CALL(F) tile_panels<F>(w, first, last, x, count, out)
    FT_BY_TILE_FORMAT(w.format, FT_CALL)
#undef FT_CALL
}

void gated_amx(const Packed &w, int64_t first, int64_t last, Activation type, const void *const *x, int64_t count,
               const GatedUnit &unit, void *const *act) {
    if (!takes(w, type, count)) return matmul_avx512_bf16.gated(w, first, last, type, x, count, unit, act);
#define FT_CALL(F) tile_gated<F>(w, first, last, x, count, unit, act)
    FT_BY_TILE_FORMAT(w.format, FT_CALL)
#undef FT_CALL
}

}  // namespace

const MatmulKernels matmul_amx = {"amx", panels_amx, gated_amx};

}  // namespace ft
