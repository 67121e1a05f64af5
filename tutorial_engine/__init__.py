"""A small, real LLM inference engine, built up notebook by notebook.

Rooms in reading order; a number is the notebook that introduces a module.

tutorial_engine/
  model/               token ids to logits
    config          01 the numbers of a config.json that fix every shape
    batch           01 the tokens of one forward, end to end, no padding
    rope            01 positions turn pairs of a head
    layers          01 Linear, RMSNorm, SiluAndMul
    fast            01 faster twins of layers, swapped into a loaded model
    attention       01 the causal rule, the textbook attention, its fast twins
    qwen3           01 the decoder
    checkpoint      01 Hugging Face files to a running model
  sampling/            logits to a token, and when to stop
    params          02 what a request asks for
    sampler         02 temperature, top-k, top-p, min-p, seeds, logprobs
    stopping        02 stop tokens, stop strings across tokens, length
  trace/               what an engine did
    events          03 frozen events, the recorder, JSON
    history         03 each step: the state before, planned, and after
    chrome          03 the same for Perfetto and chrome://tracing
    pool            04 each step's slots: used, reserved, free
  cache/               one KV storage, three maps from positions to slots
    config          02 what a token costs, how long a cache is
    storage         02 K and V per layer, addressed by slot
    memory          02 the one protocol: allocate, commit, fork, free
    rows            02 a row per sequence; the torch.cat twin
    blocks          04 who holds which block, what can be found again
    paged           04 block tables to slots
    paged_attention 04 K and V read in their blocks, by a running softmax
    many_blocks     04 the same, many blocks at a time
    cell_table      04 one cell per token: position, owners, shift
    cells           04 any token in any cell; K-shift in every layer
  engine/              requests, and the two ways to serve them
    metrics         02 queue time, TTFT, TPOT, ITL, throughput
    request         02 one sequence, where it stands, what became of it
    intake          02 what is handed in becomes requests, or an error
    runner          02 new tokens in, logits out: prefill, decode, a step
    generate        02 the loop without a scheduler
    clock           03 the machine's time, or a made one with stated prices
    delivery        03 who gets what a step brought, once
    scheduler       03 who runs how many tokens: one rule, no phases
    policies        03 three older ways, for comparison
    engine          03 add_request, step, generate, stream, abort
  tiny/                the trained tiny model: stories, training, checkpoint
  lab/                 instruments: equality, workloads, layouts, the dial
    doctor          01 is this machine set up, and what to fix
    chat            02 messages to a prompt, by the checkpoint's own template
    hf              02 transformers under our loop, our cache under transformers
    ledger          02 every path against every other, number by number
    workload        03 requests that come over time
    static_batch    03 answers when the whole batch is over, as it was
    pool_log        04 vLLM's two log lines, of our memories
    hit_rate        04 five runs that find nothing in the cache, and why
    when_full       04 a preempted request: recompute or swap, the prices
    layouts         04 the same bytes by token and by layer
    shift           04 a context shift against a fresh run, number by number
    dial            04 block size from one cell to a whole row, measured
    block_size      04 why 16: bookkeeping against waste
  parallel/            one model on several processes
    tensor_parallel A1 a rank's part of the weights, and what it adds up
    report          A1 what ranks did: tokens, bytes, who agreed
    job             A1 one rank: the same engine on its part of the model
    ranks           A1 processes on this machine; one that dies
  bench/               speed as a ratio to others', and the machine's roofline
  viz/                 pictures: scenes, parts, plots, explorers
  learn/               predictions, checks, exercises; how notebooks are built
  checks            01 one wording for sizes that are wrong
  syllabus          01 this table
"""
