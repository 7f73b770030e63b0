# ruff: noqa: E501 - lines as long as the programs write them
"""What ranks, CANN and kernels write when something fails, in their formats; the words around them are ours.

{rank} {local} {host} {pid} {ip} {dev} {at} {plog} stand for the speaker's own; {peer} {peer_ip} {peer_host} {peer_dev}
for the rank that a group names as its peer; {world} for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

PLACES = (
    "rank", "local", "host", "pid", "ip", "dip", "dev", "at", "plog", "plogms", "peer", "peer_ip", "peer_dip",
    "peer_host", "peer_dev", "peer_pid", "world", "step",
)  # fmt: skip


def fill(text: str, values: Mapping[str, str]) -> str:
    for name in PLACES:
        text = text.replace(f"{{{name}}}", values.get(name, "?"))
    return text


_IN_ALL_REDUCE = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 88, in <module>
[rank{rank}]:     main()
[rank{rank}]:   File "/job/train.py", line 61, in main
[rank{rank}]:     dist.all_reduce(loss)
[rank{rank}]:   File "/opt/env/lib/python3.10/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
[rank{rank}]:     return func(*args, **kwargs)
[rank{rank}]:   File "/opt/env/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py", line 2501, in all_reduce
[rank{rank}]:     work.wait()
"""

_PLAIN_TRACEBACK = """Traceback (most recent call last):
  File "/job/train.py", line 88, in <module>
    main()
  File "/job/train.py", line 61, in main
    run_epoch(model, loader)
  File "/job/train.py", line 40, in run_epoch
    loss.backward()
"""

PHRASES: dict[str, str] = {
    "gloo_lost": _IN_ALL_REDUCE + "[rank{rank}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
    "Connection closed by peer [{peer_ip}]:41022\n",
    "gloo_reset": _IN_ALL_REDUCE + "[rank{rank}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] "
    "Read error [{peer_ip}]:33019: Connection reset by peer\n",
    "gloo_timeout": _IN_ALL_REDUCE + "[rank{rank}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/"
    "unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete\n",
    "store_lost": _PLAIN_TRACEBACK + "torch.distributed.DistNetworkError: failed to recv, got 0 bytes\n",
    "store_joined": _PLAIN_TRACEBACK + "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for "
    "clients. 3/4 clients joined.\n",
    "c10d_client": "[W1120 10:00:00.120 socket.cpp:752] [c10d] The client socket has failed to connect to "
    "[{peer_host}]:29511 (errno: 111 - Connection refused).\n"
    + _PLAIN_TRACEBACK
    + "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
    "connect to ({peer_host}, 29511).\n",
    "nccl_watchdog": "[rank{rank}]:[E1120 10:00:00.551 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, "
    "Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
    "[rank{rank}]:[E1120 10:00:01.551 ProcessGroupNCCL.cpp:630] [Rank {rank}] Some NCCL operations have "
    "failed or timed out. To avoid data inconsistency, we are taking the entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n",
    "nccl_behind": "[rank{rank}]:[E1120 10:00:00.551 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=411, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, "
    "Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n",
    "hccl_watchdog": "[Rank {rank}] Watchdog caught collective operation timeout: WorkHCCL(SeqNum=77, OpType=ALLREDUCE, "
    "Timeout(ms)=1800000) ran for 1800114 milliseconds before timing out.\n",
    "nccl_remote": _IN_ALL_REDUCE + "[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/"
    "distributed/c10d/ProcessGroupNCCL.cpp:1333, remote process exited or there was a network error\n"
    "[rank{rank}]: ncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\n",
    "notify": "[W compiler_depend.ts:487] Warning: NPU warning, error code is 507048[Error]: \n"
    "[Error]: The execution of the internal task times out. \n"
    "        Rectify the fault based on the error information in the ascend log.\n"
    "EI0002: [PID: {pid}] {plog} The wait execution of the Notify register times out. Reason: The Notify "
    "register has not received the Notify record from remote rank [unknown].base information: "
    "[streamID:[3], taskID[5], tag[AllReduce_10.0.0.1%eth0_60000_0_1700000000000000], AlgType(level 0-1-2):"
    "[fullmesh-ring-NHR].] task information: [].\n"
    "        Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster.\n"
    "[ERROR] 2026-11-20-10:00:00 (PID:{pid}, Device:{dev}, RankID:{rank}) ERR02200 DIST call hccl api failed.\n",
    "notify_plog": "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:908] [{pid}][TaskExecStage][Timeout]"
    "[Host]Task run failed, base information is streamID:[2], taskID[21], "
    "tag[AllReduce_10.0.0.1%eth0_60000_0_1700000000000000], AlgType(level 0-1-2):[fullmesh-ring-NHR].\n"
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:771] [{pid}][TaskExecStage][Timeout]"
    "[Host]Task run failed, groupRank information is group:[hccl_world_group], user define "
    "information[], rankSize[{world}], rankId[{rank}].\n"
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:704] [{pid}][TaskExecStage][Timeout]"
    "[Host]Task run failed, opData information is timeStamp:[{plog}], deviceId[{dev}], index[21], "
    "count[256], reduceType[sum], dataType[float32].\n",
    "notify_plog_behind": "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:908] [{pid}][TaskExecStage]"
    "[Timeout][Host]Task run failed, base information is streamID:[2], taskID[19], "
    "tag[AllReduce_10.0.0.1%eth0_60000_0_1700000000000000], AlgType(level 0-1-2):[ring].\n"
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:704] [{pid}][TaskExecStage]"
    "[Timeout][Host]Task run failed, opData information is timeStamp:[{plog}], deviceId[{dev}], "
    "index[19], count[64], reduceType[sum], dataType[float32].\n",
    "notify_plog_other_group": "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:908] [{pid}][TaskExecStage]"
    "[Timeout][Host]Task run failed, base information is streamID:[4], taskID[9], "
    "tag[AllGather_tensor_group_{host}], AlgType(level 0-1-2):[ring].\n"
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:704] [{pid}][TaskExecStage]"
    "[Timeout][Host]Task run failed, opData information is timeStamp:[{plog}], "
    "deviceId[{dev}], index[7], count[64], dataType[float32].\n",
    "sdma_plog": "[ERROR] RUNTIME({pid},python3.10):{plog} [task_info.cc:1170]{pid} PrintSdmaErrorInfoForFftsPlusTask:"
    "fftsplus task execute failed, dev_id={dev}, stream_id=50, task_id=21, context_id=18, thread_id=0, "
    "err_type=4[fftsplus sdma error]\n"
    "[ERROR] HCCL({pid},python3.10):{plog} [task_exception_handler.cc:947] [{pid}][TaskExecStage][Timeout]"
    "[Host]Task run failed, base information is streamID:[32], taskID[21], "
    "tag[AllGather_10.0.0.1%eth0_60000_0_1700000000000000], AlgType(level 0-1-2):[fullmesh-ring-H-D].\n",
    "notify_plog_gather": "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:908] [{pid}][TaskExecStage]"
    "[Timeout][Host]Task run failed, base information is streamID:[2], taskID[21], "
    "tag[AllGather_10.0.0.1%eth0_60000_0_1700000000000000], AlgType(level 0-1-2):[ring].\n",
    "location_lost": "[ERROR]HCCL({pid},python):{plog}[task_exception_handler.cc:610][{pid}][TaskExecStage]"
    "[HeartbeatAbnormal]Cluster Exception Location[IP/ID]:[{peer_ip}/{peer_dev}], Arrival Time:[Fri Nov 20 "
    "10:00:00 2026], Discoverer:[{ip}/{dev}], ExceptionType:[Heartbeat Lost Occurred], Possible "
    "Reason:1. Process has exited, 2. Network Disconnected\n",
    "location_stuck": "[ERROR]HCCL({pid},python):{plog}[task_exception_handler.cc:610] [{pid}][TaskExecStage]"
    "[HeartbeatAbnormal]Cluster Exception Location[IP/ID]:[{peer_ip}/{peer_dev}], Arrival Time:[Fri Nov "
    "20 10:00:00 2026], ExceptionType:[Stuck Occurred], Possible Reason:1.Host process is stuck, "
    "2.Device task is stuck\n",
    "crimer": "[INFO] HCCL({pid},python):{plog} [heartbeat.cc:951] [{pid}][TaskExecStage][HeartbeatAbnormal]local rank "
    "[{ip}/{dev}]: crimer rank [{peer_ip}/{peer_dev}] status[LOST] by informer rank [{ip}/{dev}]\n",
    "link_timeout": "[ERROR] HCCL({pid},python3):{plog} [hccl_socket_manager.cc:797] [{pid}][Wait][LinkEstablish]wait "
    "socket establish timeout, role[1] rank[{rank}] timeout[120 s]\n"
    "[ERROR] HCCL({pid},python3):{plog} [hccl_socket_manager.cc:626] [{pid}]   |  dest_ip(user_rank)  "
    "|   dest_port   |  src_ip(user_rank)   |   src_port   |   MyRole   |   Status   |    TlsStatus   |\n"
    "[ERROR] HCCL({pid},python3):{plog} [hccl_socket_manager.cc:583] [{pid}]   |  {peer_dip}({peer})   |"
    "  16666  |   {dip}({rank})   |  3234403008  |  client  | time out |   DISABLE  | LinkInfo\n",
    "link_old": "[ERROR] HCCL({pid},python3):{plog} [comm_base.cc:970][{pid}]   |  dest_ip(rank_id)  |  src_ip(rank_id)"
    "   |   Role   |   Status   |   \n"
    "[ERROR] HCCL({pid},python3):{plog} [comm_base.cc:1018][{pid}]   |  {peer_dip}({peer})   |   "
    "{dip}({rank})  |  server  | no connect |   \n",
    "connect_err": "EI0006: [PID: {pid}] {plog} Getting socket times out. Reason: Remote Rank did not send the data in "
    "time. Please check the reason for the rank being stuck\n"
    "        Solution: 1. Check the rank service processes with other errors or no errors in the cluster.\n"
    "[ERROR] 2026-11-20-10:00:00 (PID:{pid}, Device:{dev}, RankID:{rank}) ERR02200 DIST call hccl api "
    "failed.\n",
    "meeting_server": "[ERROR] HCCL({pid},python):{plog} [topoinfo_exchange_server.cc:314] [{pid}][InitGroupStage]"
    "[RanktableDetect]topo exchange server get socket timeout! timeout[120 s]\n",
    "meeting_agent": "[ERROR] HCCL({pid},python):{plog} [topoinfo_exchange_agent.cc:190] [{pid}][InitGroupStage]"
    "[RanktableDetect]topo exchange agent get socket timeout! timeout[120] \n"
    "[ERROR] HCCL({pid},python):{plog} [topoinfo_exchange_agent.cc:41] [{pid}][TopoInfoExchangeAgent]"
    "[Setup]TopoExchangeAgent: connect server[{peer_ip} : 60000] failed\n",
    "cqe_plog": "[ERROR] ROCE({pid},python):{plog} [hns_roce_lite.c:630]hns_roce_lite_handle_error_cqe(630) : error cqe "
    "status: 0x15\n"
    "[ERROR] HCCL({pid},python):{plog} [heartbeat.cc:1229] [{pid}][TaskExecStage][HeartbeatAbnormal]"
    "[ROCE CQE ERROR]cqe error status[12], time:[2026-11-20 10:00:00.776654],localInfo{server[{ip}],"
    "deviceId[{dev}],deviceIp[{dip}]}, remoteIP{server[{peer_ip}],deviceId[{peer_dev}],deviceIp[{peer_dip}]}\n",
    "cqe_old": "[ERROR] HCCL({pid},python):{plog} [heartbeat.cc:551][{pid}][{pid}][Heartbeat]cqe err status[12], "
    "time:[2026-11-20 10:00:00.099518], ip:[{peer_dip}]\n",
    "sigterm": "[rank{rank}]:[W1120 10:00:02.551 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called\n"
    "Received signal 15, leaving\n",
    "sigterm_trace": 'Traceback (most recent call last):\n  File "/job/train.py", line 40, in run_epoch\n'
    "    batch = next(it)\nKeyboardInterrupt\n",
    "sigterm_loader": _PLAIN_TRACEBACK
    + "RuntimeError: DataLoader worker (pid 77777) is killed by signal: Terminated. \n",
    "bars": "\rEpoch 3:  41%|████      | 410/1000 [01:10<01:42,  5.76it/s, loss=2.31]",
    "ddp_warning": "[W1120 09:59:00.551 reducer.cpp:1389] Warning: find_unused_parameters=True was specified\n",
    "del_noise": "Exception ignored in: <function Pool.__del__ at 0x7f0000>\nTraceback (most recent call last):\n"
    '  File "/opt/env/lib/python3.10/multiprocessing/pool.py", line 271, in __del__\n'
    "    self._change_notifier.put(None)\nOSError: [Errno 9] Bad file descriptor\n",
}
