// Streams and events: everything runs when it is called, so a stream is a number and an event a moment.
#include "acl/acl.h"
#include "sim.h"

#include <atomic>
#include <chrono>

namespace {

struct Numbered {
    int number;
    double at_ms;
};

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

template <typename Handle>
aclError create(Handle *handle) {
    static std::atomic<int> last{2};
    *handle = new Numbered{++last, now_ms()};
    return ACL_SUCCESS;
}

Numbered *of(void *handle) { return static_cast<Numbered *>(handle); }

aclError destroy(void *handle) {
    delete of(handle);
    return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError aclrtCreateStream(aclrtStream *stream) { return create(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) { return create(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return destroy(stream); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy(stream); }

// What a collective or an operator met on the device is told by the next synchronisation.
aclError aclrtSynchronizeStream(aclrtStream) { return sim::device_error(); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return sim::device_error(); }
aclError aclrtSynchronizeDevice() { return sim::device_error(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return sim::device_error(); }
aclError aclrtSynchronizeEvent(aclrtEvent) { return sim::device_error(); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t *number) {
    *number = stream ? of(stream)->number : 0;
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return sim::device_error();
}

aclError aclrtGetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *value) {
    *value = {};
    return ACL_SUCCESS;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t *flag) {
    *flag = 0;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) { return create(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) { return create(event); }
aclError aclrtDestroyEvent(aclrtEvent event) { return destroy(event); }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
    of(event)->at_ms = now_ms();
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return sim::device_error();
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return sim::device_error();
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent from, aclrtEvent to) {
    *ms = float(of(to)->at_ms - of(from)->at_ms);
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *us) {
    *us = uint64_t(of(event)->at_ms * 1e3);
    return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback function, void *value, aclrtCallbackBlockType, aclrtStream) {
    function(value);
    return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void *value) {
    function(value);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (graph) *graph = nullptr;
    return ACL_SUCCESS;
}

}  // extern "C"
