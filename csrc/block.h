// Memory that grows and is kept: a step of decoding allocates nothing. What it held is lost when it grows.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#include "formats.h"

namespace ft {

class Block {
public:
    Block() = default;
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    ~Block() { std::free(data_); }

    // Room for `count` of T, aligned to PANEL_ALIGN. Throws std::bad_alloc.
    template <class T>
    T *get(size_t count) {
        const size_t bytes = aligned(count * sizeof(T), PANEL_ALIGN);
        if (bytes > size_) {
            release();
            data_ = std::aligned_alloc(PANEL_ALIGN, bytes);
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T *>(data_);
    }

    size_t size() const { return size_; }

    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

private:
    void *data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace ft
