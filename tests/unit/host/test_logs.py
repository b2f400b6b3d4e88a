"""The class of a crash, by the log's last lines."""

from __future__ import annotations

from pathlib import Path

from supervisor.core.types import CrashClass
from supervisor.host.process.logs import classify, tail
from tests.support.cases import cases

OOM, ARGS, LOST, PORT, MISSING, UNKNOWN = (
    CrashClass.OUT_OF_MEMORY,
    CrashClass.BAD_ARGUMENTS,
    CrashClass.GPU_LOST,
    CrashClass.PORT,
    CrashClass.NOT_INSTALLED,
    CrashClass.UNKNOWN,
)

LLAMA_MISSING = """\
0.00.004.360 I srv    load_model: loading model '/nonexist.gguf'
0.00.004.499 E gguf_init_from_file: failed to open GGUF file '/nonexist.gguf' (No such file or directory)
0.00.004.585 E llama_model_load: error loading model: llama_model_loader: failed to load model from /nonexist.gguf
0.00.004.632 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to load model
0.00.004.653 E srv    load_model: failed to load model, '/nonexist.gguf'
0.00.005.000 E srv  llama_server: exiting due to model loading error"""

LLAMA_BAD_ALLOC = """\
0.00.004.178 I srv    load_model: loading model '/tmp/tiny.gguf'
0.02.251.932 E llama_init_from_model: failed to initialize the context: std::bad_alloc
0.02.252.073 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to create llama_context from model
0.03.679.780 E srv    load_model: failed to create_context with model '/tmp/tiny.gguf'
0.03.680.349 E srv  llama_server: exiting due to model loading error"""

LLAMA_CUDA_OOM = """\
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8148.38 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 8544174080
llama_model_load: error loading model: unable to allocate CUDA0 buffer
llama_model_load_from_file_impl: failed to load model
main: exiting due to model loading error"""

LLAMA_CUDA_ERROR = """\
slot update_slots: id  0 | task 12 | prompt processing done
CUDA error: an illegal memory access was encountered
  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2513
  cudaStreamSynchronize(cuda_ctx->stream())"""

LLAMA_MLOCK = """\
warning: failed to mlock 417792-byte buffer (after previously locking 0 bytes): Cannot allocate memory
0.00.004.439 E gguf_init_from_reader: invalid magic characters: '???-', expected 'GGUF'
0.00.005.053 E srv  llama_server: exiting due to model loading error"""

LLAMA_NO_GPU = """\
ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected
error: invalid argument: --foo"""

TORCH_OOM = """\
Traceback (most recent call last):
  File "/opt/worker/server.py", line 88, in load
    model = AutoModelForCausalLM.from_pretrained(path).to("cuda")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 15.77 GiB of which 512.00 MiB is free.
[rank0]: teardown
RuntimeError: Engine core initialization failed. See root cause above."""

TORCH_CPU_OOM = """\
RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"""

VLLM_KV = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."

VLLM_NODE = "ValueError: Available memory on node 0 (1.0/23.5 GiB) on kv cache allocation is less than requested memory for kv (4.0 GiB)."
VLLM_SMALL = "ValueError: To serve at least one request with the models's max seq len (8192), (1.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.5 GiB)."
VLLM_DEVICE = (
    "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"
)

UVICORN_PORT = """\
INFO:     Application startup complete.
ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8001): address already in use"""

LLAMA_PORT = """\
0.00.002.771 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18555
0.00.002.873 E srv  llama_server: exiting due to HTTP server error"""

LLAMA_USAGE = """\
error while handling argument "--cache-type-k": Unsupported cache type: bogus

usage:
-ctk,  --cache-type-k TYPE              KV cache data type for K

to show complete usage, run with -h"""

ARGPARSE = """\
usage: server.py [-h] [--model MODEL]
server.py: error: unrecognized arguments: --modle x"""

TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/worker/server.py", line 3, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'"""

MESSAGES = [
    (
        LLAMA_MISSING,
        1,
        ARGS,
        "gguf_init_from_file: failed to open GGUF file '/nonexist.gguf' (No such file or directory)",
    ),
    (LLAMA_BAD_ALLOC, 1, OOM, "llama_init_from_model: failed to initialize the context: std::bad_alloc"),
    (LLAMA_CUDA_OOM, 1, OOM, LLAMA_CUDA_OOM.splitlines()[0]),
    (LLAMA_CUDA_ERROR, -6, LOST, "CUDA error: an illegal memory access was encountered"),
    (LLAMA_MLOCK, 1, ARGS, "gguf_init_from_reader: invalid magic characters: '???-', expected 'GGUF'"),
    (LLAMA_NO_GPU, 1, ARGS, "error: invalid argument: --foo"),
    (LLAMA_PORT, 1, PORT, "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18555"),
    (LLAMA_USAGE, 1, ARGS, 'error while handling argument "--cache-type-k": Unsupported cache type: bogus'),
    (
        "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'foo'",
        1,
        ARGS,
        "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'foo'",
    ),
    (
        "llama_model_load: error loading model: tensor 'blk.1.w' data is not within the file bounds, model is corrupted or incomplete\nx",
        1,
        ARGS,
        "llama_model_load: error loading model: tensor 'blk.1.w' data is not within the file bounds, model is corrupted or incomplete",
    ),
    ("CUDA error: out of memory\n  current device: 0", -6, OOM, "CUDA error: out of memory"),
    ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", -6, OOM, None),
    (TORCH_OOM, 1, OOM, TORCH_OOM.splitlines()[3]),
    (TORCH_CPU_OOM, 1, OOM, TORCH_CPU_OOM),
    (VLLM_KV, 1, OOM, VLLM_KV),
    (VLLM_NODE, 1, OOM, VLLM_NODE),
    (VLLM_SMALL, 1, ARGS, VLLM_SMALL),
    (VLLM_DEVICE, 1, ARGS, VLLM_DEVICE),
    ("torch.AcceleratorError: CUDA error: cudaErrorMemoryAllocation", 1, OOM, None),
    ("MemoryError", 1, OOM, "MemoryError"),
    ("OSError: [Errno 12] Cannot allocate memory", 1, OOM, None),
    ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", 1, OOM, None),
    ("CUDA error 2: cuMemAlloc CUDA_ERROR_OUT_OF_MEMORY", 1, OOM, None),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", 1, LOST, None),
    ("RuntimeError: No CUDA GPUs are available", 1, LOST, "RuntimeError: No CUDA GPUs are available"),
    ("RuntimeError: CUDA error: device-side assert triggered", 1, LOST, None),
    ("vk::DeviceLostError: vk::Queue::submit: ErrorDeviceLost", -6, LOST, None),
    (UVICORN_PORT, 1, PORT, UVICORN_PORT.splitlines()[1]),
    ("OSError: [Errno 98] Address already in use", 1, PORT, "OSError: [Errno 98] Address already in use"),
    (ARGPARSE, 2, ARGS, "server.py: error: unrecognized arguments: --modle x"),
    ("worker: error: argument --port: invalid int value: 'x'", 2, ARGS, None),
    ("usage: thing FILE", 2, ARGS, "usage: thing FILE"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/models/x'", 1, ARGS, None),
    (TRACEBACK, 1, MISSING, "ModuleNotFoundError: No module named 'torch'"),
    ("x: error while loading shared libraries: libcudart.so.12: cannot open shared object file", 127, MISSING, None),
    ("loading\nGGML_ASSERT(n > 0) failed\nbye", -6, UNKNOWN, "killed by SIGABRT: GGML_ASSERT(n > 0) failed"),
    ("hello\nworld", 3, UNKNOWN, "exited with code 3: world"),
    ("", -11, UNKNOWN, "killed by SIGSEGV and left nothing in its log"),
    ("", None, UNKNOWN, "ended and left nothing in its log"),
]


class TestClassify:
    """From exit code and log to the class of a crash and the most specific line."""

    @cases(("text", "code", "kind", "summary"), MESSAGES)
    def test_messages_of_real_programs(self, text, code, kind, summary):
        crash = classify(code, text.splitlines())
        assert crash.kind is kind
        assert crash.exit_code == code
        if summary is not None:
            assert crash.operator_summary == summary

    def test_a_kill_by_the_kernel_needs_no_log(self):
        crash = classify(-9, ["all is well"], oom_killed=True)
        assert crash.kind is OOM
        assert crash.summary == "killed by SIGKILL by the kernel: out of memory"

    def test_a_kill_by_somebody_is_not_called_out_of_memory(self):
        assert classify(-9, ["all is well"]).kind is UNKNOWN

    def test_a_signal_never_means_bad_arguments(self):
        assert classify(-11, ["error: invalid argument: --foo"]).kind is UNKNOWN

    def test_a_good_exit_is_never_explained_by_an_old_error(self):
        crash = classify(0, ["request failed: CUDA out of memory", "bye"])
        assert crash.kind is UNKNOWN
        assert crash.exit_code == 0

    def test_keeps_the_last_lines_only(self):
        crash = classify(1, [f"line {i}" for i in range(100)])
        assert crash.log_tail == tuple(f"line {i}" for i in range(80, 100))


class TestTail:
    """The end of a log, cleaned for showing."""

    def test_last_lines(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_text("".join(f"line {i}\n" for i in range(1000)))
        assert tail(path, 3) == ("line 997", "line 998", "line 999")

    def test_never_reads_more_than_it_may(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_bytes(b"x" * 100_000 + b"\nthe end\n")
        assert tail(path, 10, max_bytes=1000) == ("the end",)

    def test_one_endless_line_is_cut(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_bytes(b"x" * 100_000)
        assert tail(path, 10, max_bytes=1000) == ("x" * 500,)

    def test_escapes_progress_bars_and_broken_text(self, tmp_path: Path):
        path = tmp_path / "log"
        path.write_bytes(b"\x1b[31mred\x1b[0m\n 10%\r 50%\r100%\r\n\xff\xfe\x07bell\n\n")
        assert tail(path, 10) == ("red", "100%", "��bell")

    def test_no_log_is_no_lines(self, tmp_path: Path):
        assert tail(tmp_path / "none", 10) == ()
