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

static aclError run(const char *name, int, const aclDataBuffer *const *in, int, aclDataBuffer *const *out) {
    if (int code = sim::device_error()) return code;
    if (!strcmp(name, "PadV3")) {
        memset(out[0]->data, 0, out[0]->bytes);
        memcpy(out[0]->data, in[0]->data, std::min(in[0]->bytes, out[0]->bytes));
        return ACL_SUCCESS;
    }
    char text[256];
    snprintf(text, sizeof text, "Cannot find bin of op %s, it is not simulated.", name);
    sim::report("EZ3002", text);
    return ACL_ERROR_OP_NOT_FOUND;
}

extern "C" {

aclError aclopCompileAndExecute(const char *name, int inputs, const aclTensorDesc *const *, const aclDataBuffer *const *in,
                                int outputs, const aclTensorDesc *const *, aclDataBuffer *const *out, const aclopAttr *,
                                aclopEngineType, aclopCompileType, const char *, aclrtStream) {
    return run(name, inputs, in, outputs, out);
}

aclError aclopCompileAndExecuteV2(const char *name, int inputs, aclTensorDesc **, aclDataBuffer **in, int outputs,
                                  aclTensorDesc **, aclDataBuffer **out, aclopAttr *, aclopEngineType, aclopCompileType,
                                  const char *, aclrtStream) {
    return run(name, inputs, in, outputs, out);
}

aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    delete buffer;
    return ACL_SUCCESS;
}

// Never looked into here; torch_npu only wants something to hold.
aclopAttr *aclopCreateAttr() { return static_cast<aclopAttr *>(malloc(1)); }
void aclopDestroyAttr(const aclopAttr *attributes) { free(const_cast<aclopAttr *>(attributes)); }

aclTensorDesc *aclCreateTensorDesc(aclDataType, int, const int64_t *, aclFormat) {
    return static_cast<aclTensorDesc *>(malloc(1));
}

void aclDestroyTensorDesc(const aclTensorDesc *description) { free(const_cast<aclTensorDesc *>(description)); }

size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }

aclError aclGetCompileopt(aclCompileOpt, char *value, size_t) {
    *value = 0;
    return ACL_SUCCESS;
}

}  // extern "C"
