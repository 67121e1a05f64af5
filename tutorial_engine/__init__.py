"""A small, real LLM inference engine, built up notebook by notebook.

tutorial_engine/
  -- 01_attention_rope: one sequence, no cache
  config             the numbers of a config.json that fix every shape
  batch              the tokens of one forward, end to end, no padding
  rope               positions turn pairs of a head
  layers             Linear (prepacked), RMSNorm, SiluAndMul
  attention          the causal rule, the textbook attention, its fast twin
  model              the Qwen3 decoder
  checkpoint_files   where the files are, what tensors they hold
  checkpoint         Hugging Face files to a running model
  tiny               the trained tiny model: stories, training, checkpoint
  doctor             is this machine set up, and what to fix
  -- 02_kv_cache: prefill and decode
  cache_config       what a token costs, how long a cache is
  kv_storage         the shelves: K and V per layer, by slot
  kv_cache           the address book: a row per sequence; the torch.cat twin
  blocked_attention  prefill attention in blocks, for CPUs
  prompts            texts and token ids that may be handed in, checked
  runner             prefill and decode: new tokens in, logits out
  sampling_params    what a request asks for
  sampling           temperature, top-k, top-p, min-p, seeds, logprobs
  stopping           stop tokens, stop strings across tokens, length
  generate           prompts in, text out: the loop
  chat               messages to a prompt, by the checkpoint's own template
  peers              transformers under our loop, our cache under transformers
  ledger             every path against every other, number by number
  bench              our speed as a ratio to others', and the machine's roofline
  -- 03_scheduler: many requests
  clock              the machine's time, or a made one with stated prices
  metrics            queue time, TTFT, TPOT, ITL, throughput
  trace              what the engine did, event by event; JSON
  replay             from a trace back to the state at any step
  request            one request and where it stands
  kv_manager         what a scheduler asks of memory; a row per request
  step_plan          the limits of a step, and who got what
  scheduler          who runs how many tokens: one rule, no phases
  policies           three older ways, for comparison
  model_runner       a plan to logits: one forward per step
  intake             what is handed in becomes a request, or an error
  delivery           who gets what a step brought, once
  interrupts         Ctrl-C never in the middle of bookkeeping
  engine             add_request, step, generate, stream, abort
  workload           requests that come over time
  engine_paths       the engine's rows of the equality ledger
  -- 04_paged_cells: memory
  blocks             who holds which block, what can be found again
  paged              pages: block tables to slots, under the same engine
  cell_table         one cell per token: position, owners, shift
  cell_cache         cells by hand, with shelves; K-shift in every layer
  cells              cells under the same engine
  layouts            the same bytes by token and by layer
  memory_paths       pages and cells in the equality ledger
  pool               a trace as slots: whose, reserved, free, step by step
  dial               one storage, three maps: block size from 1 to a row
  parallel_model     a rank's share of a model, and what it adds up
  parallel_report    what ranks did: tokens, bytes, who agreed
  parallel_run       one rank: the same engine on a share of the model
  parallel           two ranks on this machine; a rank that dies
  -- seeing and doing
  syllabus           this table
  viz                pictures: style, plots, scenes, explorers
  learn              predictions, checks, exercises; how notebooks are built
"""
