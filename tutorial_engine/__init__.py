"""A small, real LLM inference engine, built up notebook by notebook.

tutorial_engine/
  -- 01_attention_rope: one sequence, no cache
  config      the numbers of a config.json that fix every shape
  batch       the tokens of one forward, end to end, no padding
  rope        positions turn pairs of a head
  layers      Linear (prepacked), RMSNorm, SiluAndMul
  attention   the causal rule, the textbook attention, its fast twin
  model       the Qwen3 decoder
  checkpoint  Hugging Face files to a running model
  tiny        the trained tiny model: stories, training, checkpoint
  bench       our speed as a ratio to transformers'
  doctor      is this machine set up, and what to fix
  -- seeing and doing
  syllabus    this table
  viz         pictures: style, plots, scenes, explorers
  learn       predictions, checks, exercises; how notebooks are built
"""
