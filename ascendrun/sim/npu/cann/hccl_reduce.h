// Sums and their like over the parts that all ranks sent, always in the order of ranks.
#pragma once

#include "hccl/hccl_types.h"

#include <cstddef>
#include <vector>

namespace sim {

size_t width_of(HcclDataType type);  // bytes of one number, 0: unknown here
// False: this cannot be computed of numbers of this type.
bool reduce(void *answer, const std::vector<const char *> &parts, size_t count, HcclDataType type, HcclReduceOp how);

}  // namespace sim
