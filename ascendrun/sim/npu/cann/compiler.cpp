// The older way to run an operator, by name: a few that torch_npu itself still runs so; the others are said.
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "sim.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct aclDataBuffer {
    void *data;
    size_t bytes;
};

// Of a tensor only its type matters here.
struct aclTensorDesc {
    aclDataType type;
};

template <typename Use>
static bool with_type(aclDataType type, Use use) {
    switch (type) {
        case ACL_BOOL: use(bool{}); return true;
        case ACL_UINT8: use(uint8_t{}); return true;
        case ACL_INT8: use(int8_t{}); return true;
        case ACL_INT32: use(int32_t{}); return true;
        case ACL_INT64: use(int64_t{}); return true;
        case ACL_FLOAT16: use(_Float16{}); return true;
        case ACL_FLOAT: use(float{}); return true;
        case ACL_DOUBLE: use(double{}); return true;
        default: return false;
    }
}

static bool cast(const aclDataBuffer *from, aclDataType from_type, aclDataBuffer *to, aclDataType to_type) {
    bool can = false;
    with_type(from_type, [&](auto source) {
        can = with_type(to_type, [&](auto target) {
            auto *in = static_cast<const decltype(source) *>(from->data);
            auto *out = static_cast<decltype(target) *>(to->data);
            for (size_t i = 0; i < to->bytes / sizeof target; ++i) out[i] = decltype(target)(in[i]);
        });
    });
    return can;
}

static aclError run(const char *name, const aclTensorDesc *const *of_in, const aclDataBuffer *const *in,
                    const aclTensorDesc *const *of_out, aclDataBuffer *const *out) {
    if (int code = sim::device_error()) return code;
    if (!strcmp(name, "PadV3")) {
        memset(out[0]->data, 0, out[0]->bytes);
        memcpy(out[0]->data, in[0]->data, std::min(in[0]->bytes, out[0]->bytes));
        return ACL_SUCCESS;
    }
    if (!strcmp(name, "Fill")) {  // of a shape, with a value
        auto *to = static_cast<char *>(out[0]->data);
        for (size_t at = 0; at + in[1]->bytes <= out[0]->bytes; at += in[1]->bytes) memcpy(to + at, in[1]->data, in[1]->bytes);
        return ACL_SUCCESS;
    }
    if (!strcmp(name, "Cast") && cast(in[0], of_in[0]->type, out[0], of_out[0]->type)) return ACL_SUCCESS;
    char text[256];
    snprintf(text, sizeof text, "Cannot find bin of op %s, it is not simulated.", name);
    sim::report("EZ3002", text);
    return ACL_ERROR_OP_NOT_FOUND;
}

extern "C" {

aclError aclopCompileAndExecute(const char *name, int, const aclTensorDesc *const *of_in, const aclDataBuffer *const *in,
                                int, const aclTensorDesc *const *of_out, aclDataBuffer *const *out, const aclopAttr *,
                                aclopEngineType, aclopCompileType, const char *, aclrtStream) {
    return run(name, of_in, in, of_out, out);
}

aclError aclopCompileAndExecuteV2(const char *name, int, aclTensorDesc **of_in, aclDataBuffer **in, int,
                                  aclTensorDesc **of_out, aclDataBuffer **out, aclopAttr *, aclopEngineType, aclopCompileType,
                                  const char *, aclrtStream) {
    return run(name, of_in, in, of_out, out);
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    delete buffer;
    return ACL_SUCCESS;
}

// Never looked into here; torch_npu only wants something to hold.
aclopAttr *aclopCreateAttr() { return static_cast<aclopAttr *>(malloc(1)); }
void aclopDestroyAttr(const aclopAttr *attributes) { free(const_cast<aclopAttr *>(attributes)); }

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int, const int64_t *, aclFormat) { return new aclTensorDesc{type}; }

void aclDestroyTensorDesc(const aclTensorDesc *description) { delete description; }

size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }

aclError aclGetCompileopt(aclCompileOpt, char *value, size_t) {
    *value = 0;
    return ACL_SUCCESS;
}

}  // extern "C"
