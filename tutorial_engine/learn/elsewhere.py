"""Our pieces and ways beside those of vLLM, SGLang and llama.cpp.

A table of names to search for, and boxes where we differ. Each name of ours is checked to be there.
Theirs were looked up in the versions that are named; they may move, so no line numbers.
"""

import textwrap
from html import escape
from importlib import import_module
from typing import NamedTuple


class Piece(NamedTuple):
    """One idea under four names; "" where an engine has no such thing of its own."""

    ours: str  # room.module.name, below tutorial_engine
    what: str  # it is, and the notebook that has it
    vllm: str
    sglang: str
    llama_cpp: str


PIECES = (
    Piece(
        *("model.batch.Batch", "tokens of a forward (01)"),
        *("InputBatch", "ForwardBatch", "llama_ubatch"),
    ),
    Piece(
        *("model.batch.Batch.slot_mapping", "slot of each token (02)"),
        *("slot_mapping", "out_cache_loc", "slot_info"),
    ),
    Piece(
        *("cache.storage.KVStorage", "K and V, slot by slot (02)"),
        *("kv_caches", "MHATokenToKVPool", "llama_kv_cache"),
    ),
    Piece(
        *("engine.request.Request", "prompt, answer, state (03)"),
        *("Request", "Req", "server_slot"),
    ),
    Piece(
        *("engine.scheduler.Scheduler", "plans a step (03)"),
        *("Scheduler", "Scheduler", "server_context"),
    ),
    Piece(
        *("engine.engine.LLMEngine", "the loop of steps (03)"),
        *("EngineCore", "Scheduler", "server_context"),
    ),
    Piece(
        *("engine.runner.ModelRunner", "runs a planned step (04)"),
        *("GPUModelRunner", "ModelRunner", "llama_context"),
    ),
    Piece(
        *("cache.paged.PagedKVCache", "memory in pages (04)"),
        *("KVCacheManager", "ReqToTokenPool", ""),
    ),
    Piece(
        *("cache.cell_table.CellTable", "who owns which cell (04)"),
        *("", "", "llama_kv_cells"),
    ),
    Piece(
        *("cache.cell_table.CellTable.find_slot", "finds free cells (04)"),
        *("", "", "find_slot"),
    ),
    Piece(
        *("cache.cells.CellKVCache.apply_shifts", "turns K after a shift (04)"),
        *("", "", "build_rope_shift"),
    ),
    Piece(
        *("cache.blocks.BlockManager", "hands out blocks (04, 05)"),
        *("BlockPool", "UnifiedRadixCache, TokenToKVPoolAllocator", ""),
    ),
    Piece(
        *("parallel.tensor_parallel.RowParallelLinear", "a part, then the sum (A1)"),
        *("RowParallelLinear", "RowParallelLinear", "llama_split_mode"),
    ),
)


def find(name: str) -> object:
    """Our piece itself. AttributeError or ModuleNotFoundError if it is called otherwise now."""
    room, module, *path = name.split(".")
    thing: object = import_module(f"tutorial_engine.{room}.{module}")
    for part in path:
        fields = getattr(thing, "__dataclass_fields__", {})
        thing = fields[part] if part in fields else getattr(thing, part)
    return thing


class Names:
    """All pieces: what each is, and its names. A table in a notebook, else as text."""

    def __init__(self) -> None:
        for piece in PIECES:
            find(piece.ours)
        self.head = ("what it is (notebook)", "here", "vLLM", "SGLang", "llama.cpp")
        self.lines = [
            (what, ours.split(".", 2)[2], *(name or "–" for name in theirs))
            for ours, what, *theirs in PIECES
        ]

    def __repr__(self) -> str:
        lines = [self.head, *self.lines]
        wide = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
        rows = ("".join(f"{cell:<{wide[i]}}" for i, cell in enumerate(line)) for line in lines)
        return "\n".join(row.rstrip() for row in rows)

    def _repr_html_(self) -> str:
        left = ' style="text-align:left"'
        rows = "".join(f"<th{left}>{cell}</th>" for cell in self.head)
        for what, *names in self.lines:
            cells = (f"<code>{escape(name)}</code>" if name != "–" else name for name in names)
            rows += f"</tr><tr><td{left}>{escape(what)}</td>"
            rows += "".join(f"<td{left}>{cell}</td>" for cell in cells)
        return f"<table><tr>{rows}</tr></table>"


def names_elsewhere() -> Names:
    """All pieces, a line each: what it is, and the names. Errors as `find`."""
    return Names()


VLLM, SGLANG, LLAMA_CPP = "vLLM 0.32", "SGLang 0.5.19", "llama.cpp, build 10970"
READ = "November 2026"


class Box(NamedTuple):
    """One thing that engines do in different ways: in a sentence, then ours by name, then each."""

    title: str
    gist: str
    piece: str  # room.module.name, below tutorial_engine
    ours: str
    vllm: str
    sglang: str
    llama_cpp: str


BOXES = {
    "fork": Box(
        "several answers to one prompt",
        "vLLM and SGLang run n requests that find the prompt in the prefix cache; llama.cpp "
        "gives the cells of a slot to the others.",
        "engine.scheduler.Scheduler.fork",
        "The prompt is run once. Then the request is forked: its samples share all blocks, and who "
        "writes first to a shared open block copies it.",
        "n answers are n requests (ParentRequest in vllm/v1/engine/parallel_sampling.py). They "
        "share full blocks because the prefix cache finds them; nothing is forked.",
        "The prompt is first run alone with max_new_tokens = 0, which fills the prefix cache. Then "
        "n requests follow (TokenizerManager._handle_batch_request in "
        "python/sglang/srt/managers/tokenizer_manager.py).",
        "A slot that has run the prompt gives its cells to the others (server_slot::copy_state_to "
        "in tools/server/server-context.cpp, which calls seq_cp). In one common buffer only owners "
        "are added; with a buffer for each slot the data is copied (llama_kv_cache::seq_cp in "
        "src/llama-kv-cache.cpp).",
    ),
    "admission": Box(
        "who is let in",
        "vLLM asks for room for the whole prompt, as here; SGLang adds a guess of the output; "
        "llama.cpp asks only for a free slot.",
        "cache.paged.PagedKVCache.tokens_to_admit",
        "The whole prompt must fit, but its blocks are taken chunk by chunk.",
        "The same: the whole prompt must fit (scheduler_reserve_full_isl in "
        "vllm/config/scheduler.py, on by default), and blocks are taken chunk by chunk "
        "(KVCacheManager.allocate_slots in "
        "vllm/v1/core/kv_cache_manager.py). Before pull request 37307 the first chunk decided; its "
        "author saw a server fall from about 100 to 1.5 tokens a second on each GPU.",
        "The rest of the prompt and a guess of the tokens to come must fit "
        "(PrefillAdder.add_one_req in python/sglang/srt/managers/schedule_policy.py).",
        "A request waits for a free slot (server_context_impl::get_available_slot in "
        "tools/server/server-context.cpp). With one common buffer (the default, see --kv-unified) "
        "nobody asks whether its prompt fits: the slots can promise more than there is.",
    ),
    "same_step": Box(
        "two requests with the same beginning in the same step",
        "In vLLM (with attention layers) the second one finds the beginning at once, as here; in "
        "SGLang it depends on the policy and on the room in the step; in llama.cpp both run it, "
        "also in later steps: a busy slot is not looked at.",
        "cache.blocks.BlockManager.cache_full_blocks",
        "The blocks that a step computes get their hashes when it is planned, so the second one "
        "finds them in the same step.",
        "The same (KVCacheManager.allocate_slots in vllm/v1/core/kv_cache_manager.py).",
        "With the policy lpm (longest prefix first) the second one goes to the end of the queue, "
        "if they share at least 32 tokens (by default): it finds the beginning later, if the step "
        "is full before its turn (SchedulePolicy._compute_prefix_matches in "
        "python/sglang/srt/managers/schedule_policy.py). If there is room for both, and with fcfs "
        "(first come, first served; the default), both run the beginning.",
        "Slots are compared by their earlier prompts only "
        "(server_context_impl::get_available_slot in tools/server/server-context.cpp): both run "
        "the beginning.",
    ),
    "context_shift": Box(
        "the context is full",
        "Only llama.cpp has a shift, and there it is off by default.",
        "cache.cells.CellKVCache.seq_add",
        'The request ends ("length"). A shift is made by hand, and is refused for a shared cell.',
        "The request ends (check_stop in vllm/v1/core/sched/utils.py). There is no shift.",
        "The request ends. There is no shift.",
        "A shift exists and is off by default (--context-shift in common/arg.cpp): the server "
        "forgets half of what follows the kept beginning "
        "(tools/server/server-context.cpp, seq_rm and seq_add). A cell has one position, so "
        "llama_kv_cells::pos_add in src/llama-kv-cells.h moves it for all its owners.",
    ),
    "ranks": Box(
        "one model on several devices",
        "vLLM has one scheduler for all ranks, SGLang one in each rank, llama.cpp one process "
        "for all devices.",
        "parallel.job.Job",
        "Each rank runs its own engine and scheduler. All decide the same, because they see the "
        "same requests and the same logits.",
        "One scheduler for all ranks, in EngineCore (vllm/v1/engine/core.py). Each step it sends "
        "the plan to the workers (MultiprocExecutor in vllm/v1/executor/multiproc_executor.py).",
        "A scheduler in each rank, as here. Rank 0 receives the requests and sends them to the "
        "others (SchedulerRequestReceiver.recv_requests in "
        "python/sglang/srt/managers/scheduler_components/request_receiver.py).",
        "One process drives all devices. --split-mode layer, the default, gives whole layers to "
        "each; tensor, still experimental, divides each layer and its K/V, as here "
        "(llama_split_mode in include/llama.h).",
    ),
    "graphs": Box(
        "steps that are recorded and replayed",
        "vLLM and SGLang record a list of batch sizes at the start; llama.cpp records a step when "
        "it comes again in the same form.",
        "engine.replay.ReplayRunner",
        "Decode steps only, one recording for each power of two of sequences and of the longest "
        "context, made when it is needed first.",
        "Batch sizes 1, 2, 4, then every 8th up to 256 and every 16th up to 512 "
        "(_set_cudagraph_sizes in vllm/config/vllm.py). They have no length: the kernel reads "
        "the block table. Steps with prompts are replayed in pieces, with attention between them "
        "(FULL_AND_PIECEWISE in vllm/config/compilation.py). Looked up in vLLM 0.32.0.",
        "Batch sizes 1, 2, 4, 8, 12, then every 8th from 16 to 256, every 16th up to 512, every "
        "32nd beyond "
        "(generate_decode_cuda_graph_batch_sizes in "
        "python/sglang/srt/arg_groups/cuda_graph_hook.py).",
        "There is no list of sizes: a graph that comes again with the same shapes and places is "
        "recorded, and recorded anew when they change (ggml_cuda_graph_update_required in "
        "ggml/src/ggml-cuda/ggml-cuda.cu). GGML_CUDA_DISABLE_GRAPHS=1 turns it off.",
    ),
    "one_call": Box(
        "attention of a whole batch",
        "All three call one kernel for the whole batch; in vLLM and SGLang it reads pages where "
        "they lie, and no context is gathered before.",
        "model.batched_attention.BatchedAttention",
        "All contexts are gathered, and PyTorch's flash kernel goes over them end to end. Pages "
        "are not read in place on a GPU.",
        "flash_attn_varlen_func takes the sequences end to end, and the block table "
        "(vllm/v1/attention/backends/flash_attn.py).",
        "flash_attn_with_kvcache takes them end to end, and the page table "
        "(python/sglang/srt/layers/attention/flashattention_backend.py). FlashInfer is another "
        "choice.",
        "One operation over the cells of the cache; a mask says which token sees which cell "
        "(build_attn_mha in src/llama-graph.cpp).",
    ),
    "fused": Box(
        "small operations",
        "All three join small operations into one kernel, by hand or by a compiler.",
        "model.fast.FusedRMSNorm",
        "A norm is one kernel. RoPE is six for q and six for k, and nothing is compiled.",
        "Kernels of its own, such as fused_add_rms_norm "
        "(vllm/model_executor/layers/layernorm.py); torch.compile joins others "
        "(vllm/compilation/passes/fusion/qk_norm_rope_fusion.py).",
        "Kernels of its own: fused_add_rmsnorm (python/sglang/srt/layers/layernorm.py).",
        "The CUDA backend looks for neighbours in the graph that it can run as one kernel, such "
        "as two matrix products and the gate between them (ggml_cuda_should_fuse_mul_mat in "
        "ggml/src/ggml-cuda/ggml-cuda.cu).",
    ),
    "radix": Box(
        "how a known beginning is found",
        "vLLM uses hashes, as here; SGLang keeps a tree of tokens; llama.cpp compares a prompt "
        "with what each slot holds.",
        "cache.blocks.BlockManager.find",
        "By a hash of each full block and of all that is before it.",
        "The same (hash_block_tokens in vllm/v1/core/kv_cache_utils.py).",
        "In a radix tree over token ids, by default token by token (UnifiedRadixCache.match_prefix "
        "in python/sglang/srt/mem_cache/unified_radix_cache.py, the default for all models since "
        "August 2026: pull request 35081; before, RadixCache in radix_cache.py).",
        "By comparing the new prompt with what each slot holds "
        "(server_context_impl::get_available_slot in tools/server/server-context.cpp): one slot's "
        "beginning is used again, or what earlier prompts left in the computer's memory "
        "(--cache-ram, on by default).",
    ),
    "swap": Box(
        "memory is full while requests run",
        "vLLM and SGLang compute again, as here; llama.cpp empties idle slots, and then ends "
        "requests that run.",
        "engine.scheduler.Scheduler.preempt",
        "The last one gives way, and is computed again.",
        "The same (Scheduler._preempt_request in vllm/v1/core/sched/scheduler.py). The first vLLM "
        "could swap; v1 cannot, but may keep copies of blocks in the computer's memory "
        "(OffloadingConnector, below vllm/distributed/kv_transfer).",
        "Requests are retracted and computed again (ScheduleBatch.retract_decode in "
        "python/sglang/srt/managers/schedule_batch.py). The prefix cache may spill to the "
        "computer's memory (HiCache, --enable-hierarchical-cache).",
        "Nobody gives way to be computed again. In one common buffer, idle slots are purged first; "
        "if this is not enough, active ones are ended with an error (as the description of pull "
        "request 16736 says; read there, not looked up in this build). Prompts of idle slots are "
        "kept in the computer's memory (--cache-ram; server_prompt_cache in "
        "tools/server/server-task.cpp).",
    ),
    "kv_unified": Box(
        "is the context divided among the users?",
        "vLLM and SGLang have one pool for all; in llama.cpp an option decides.",
        "cache.cells.CellKVCache",
        "Rows: yes, each user has max_model_len. Pages and cells: no, all share one pool.",
        "No: one pool of blocks (BlockPool in vllm/v1/core/block_pool.py).",
        "No: one pool (python/sglang/srt/mem_cache/memory_pool.py).",
        "It depends. With a number of slots given (-np; a slot there is a place for a request), "
        "each has its part of -c (n_ctx_seq in "
        "src/llama-context.cpp). With --kv-unified (-kvu), which is on where the number of slots "
        "is not given (tools/server/server.cpp), all share one buffer.",
    ),
    "step_order": Box(
        "who runs in a step",
        "vLLM and llama.cpp go on with running requests first, as here; SGLang reads new "
        "prompts first.",
        "engine.scheduler.Scheduler.schedule",
        "Running requests first, then those that wait. A step may read prompts and decode.",
        "The same (Scheduler.schedule in vllm/v1/core/sched/scheduler.py). Its tuning guide says "
        "of the budget, max_num_batched_tokens: smaller is better for ITL, larger for TTFT "
        "(docs/configuration/optimization.md).",
        "New prompts first: a step reads prompts or decodes (Scheduler.get_next_batch_to_run in "
        "python/sglang/srt/managers/scheduler.py). With --enable-mixed-chunk, off by default, "
        "decodes run along with a chunk.",
        "As here: first the newest token of each slot (its word for a place) that decodes, then "
        "prompts, up to n_batch tokens (server_context_impl::update_slots in "
        "tools/server/server-context.cpp).",
    ),
}


class Told:
    """A box to be shown: folded below its sentence in a notebook, in full as text."""

    def __init__(self, box: Box) -> None:
        self.title, self.gist = box.title + "." * (box.title[-1] != "?"), box.gist
        who = (f"here ({box.piece})", VLLM, SGLANG, LLAMA_CPP)
        self.engines = dict(zip(who, (box.ours, *box[4:]), strict=True))

    def __repr__(self) -> str:
        lines = textwrap.wrap(f"In other engines (read in {READ}): {self.title} {self.gist}", 92)
        for name, text in self.engines.items():
            lines += textwrap.wrap(
                f"{name}: {text}",
                92,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        each = (f"<li><b>{escape(w)}</b>: {escape(how)}</li>" for w, how in self.engines.items())
        head = f"<b>In other engines (read in {READ}): {escape(self.title)}</b> {escape(self.gist)}"
        return f"<details><summary>{head}</summary><ul>{''.join(each)}</ul></details>"


def box(topic: str) -> Told:
    """What we do, and what vLLM, SGLang and llama.cpp do, with file and function.

    ValueError, with the topics there are, for another one.
    """
    if topic not in BOXES:
        raise ValueError(f"there is no box {topic!r}; there are {', '.join(BOXES)}")
    find(BOXES[topic].piece)
    return Told(BOXES[topic])
