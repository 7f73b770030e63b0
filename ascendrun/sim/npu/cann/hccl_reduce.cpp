// Sums, products, smallest and largest; half precision is added up in float and rounded once.
#include "hccl_reduce.h"

#include <cstdint>
#include <cstring>

namespace sim {

struct Bf16 {
    uint16_t bits;
};

static float widen(Bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static float widen(_Float16 value) { return float(value); }

template <typename Number>
static Number widen(Number value) {
    return value;
}

template <typename Wide>
static void narrow(Wide value, Wide &answer) {
    answer = value;
}

static void narrow(float value, _Float16 &answer) { answer = _Float16(value); }

static void narrow(float value, Bf16 &answer) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bool is_nan = value != value;
    answer.bits = uint16_t(is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename Number, typename Combine>
static void fold(void *answer, const std::vector<const char *> &parts, size_t count, Combine combine) {
    auto *out = static_cast<Number *>(answer);
    for (size_t i = 0; i < count; ++i) {
        auto total = widen(reinterpret_cast<const Number *>(parts[0])[i]);
        for (size_t rank = 1; rank < parts.size(); ++rank)
            total = combine(total, widen(reinterpret_cast<const Number *>(parts[rank])[i]));
        narrow(total, out[i]);
    }
}

template <typename Number>
static bool reduce_as(void *answer, const std::vector<const char *> &parts, size_t count, HcclReduceOp how) {
    switch (how) {
        case HCCL_REDUCE_SUM: fold<Number>(answer, parts, count, [](auto a, auto b) { return decltype(a)(a + b); }); return true;
        case HCCL_REDUCE_PROD: fold<Number>(answer, parts, count, [](auto a, auto b) { return decltype(a)(a * b); }); return true;
        case HCCL_REDUCE_MAX: fold<Number>(answer, parts, count, [](auto a, auto b) { return a > b || a != a ? a : b; }); return true;
        case HCCL_REDUCE_MIN: fold<Number>(answer, parts, count, [](auto a, auto b) { return a < b || a != a ? a : b; }); return true;
        default: return false;
    }
}

bool reduce(void *answer, const std::vector<const char *> &parts, size_t count, HcclDataType type, HcclReduceOp how) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(answer, parts, count, how);
        case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(answer, parts, count, how);
        case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(answer, parts, count, how);
        case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(answer, parts, count, how);
        case HCCL_DATA_TYPE_UINT8: return reduce_as<uint8_t>(answer, parts, count, how);
        case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16>(answer, parts, count, how);
        case HCCL_DATA_TYPE_BFP16: return reduce_as<Bf16>(answer, parts, count, how);
        case HCCL_DATA_TYPE_FP32: return reduce_as<float>(answer, parts, count, how);
        case HCCL_DATA_TYPE_FP64: return reduce_as<double>(answer, parts, count, how);
        default: return false;
    }
}

size_t width_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8:
        case HCCL_DATA_TYPE_HIF8:
        case HCCL_DATA_TYPE_FP8E4M3:
        case HCCL_DATA_TYPE_FP8E5M2: return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_UINT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_UINT32:
        case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_UINT64:
        case HCCL_DATA_TYPE_FP64: return 8;
        default: return 0;
    }
}

}  // namespace sim
