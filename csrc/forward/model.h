// A dense decoder, or one with state mixers beside attention: what its layers are made of, where
// a step's numbers lie.
#pragma once
#include <vector>

#include "attention/backend.h"
#include "kernels.h"
#include "mixer.h"
#include "neighbours.h"
#include "partials/away.h"

namespace kvell {

struct Rope {
  std::vector<float> frequencies;
  float factor;  // of cosines and sines
};

struct DecoderLayer {
  Norm before_attention, query_norm, key_norm, after_attention, before_mlp, after_mlp;
  Matrix qkv, out, gate_up, down;
  float out_factor, down_factor;  // of what attention and MLP add to the stream
  int rope;  // index; -1: none
  Rule rule;
  int group;    // whose metadata, of the step's
  Layer pages;  // set by attach
  Mixer mixer;  // beside attention, if there is one
};

struct Decoder {
  const Kernels* kernels;
  const Backend* attention;
  int64_t hidden, heads, kv_heads, head_size, intermediate;
  Activation activation;
  Embedding embedding;
  Norm final_norm;
  Matrix head;
  MixerShape mixer;  // all zero without any
  float softcap;  // of logits
  std::vector<Rope> ropes;
  std::vector<DecoderLayer> layers;

  int64_t element_size() const { return kernels->element == Element::float32 ? 4 : 2; }
  int64_t qkv_size() const { return (heads + 2 * kv_heads) * head_size; }
  // Queries, keys, values, and what a mixer reads, of a token.
  int64_t projected() const { return qkv_size() + mixer.projected(); }
  int64_t items(int64_t numbers) const { return numbers * element_size() / 4; }
};

// Where a step's numbers lie in one run of bytes.
struct Workspace {
  Workspace(const Decoder& decoder, int64_t tokens, int64_t rows, uint8_t* at);

  float* stream;     // [tokens, hidden]
  void* normed;      // [tokens, hidden] elements
  float* projected;  // [tokens, projected]
  void* query;       // [tokens, heads · head_size] elements
  void* attended;    // the same
  void* inner;       // [tokens, intermediate] elements
  float* branch;     // [tokens, hidden]
  float* rotations;  // by rope: [tokens, cosines and sines]
  float* mixed;      // [tokens, mixed]
  void* gated;       // [tokens, inner of the mixer] elements
  float* rows_stream;  // [rows, hidden]: of those whose logits are wanted
  void* rows_attended;  // [rows, heads · head_size] elements
  void* rows_gated;     // [rows, inner of the mixer] elements
  int64_t bytes;
};

struct GroupStep {
  Batch batch;
  const int32_t *write_page_ids, *write_offsets;
};

struct Step {
  int64_t tokens;
  const int64_t *ids, *positions;
  int64_t rows;
  const int64_t* logits_rows;
  std::vector<GroupStep> groups;
  std::vector<StateBatch> states;  // by group of states
  uint8_t* workspace;
  uint8_t* scratch;  // for attention
  int64_t scratch_bytes;
  float* logits;     // [rows, vocab]
  int64_t* largest;  // [rows], the first of the largest logits of each, or kNotNumbers; null if nobody asks
  TeamWay way;
  Away* away;  // sections that others hold; null: none
};

// What attention, and scans, get beside a step's workspace, for contexts of so many tokens.
int64_t attention_bytes(const Decoder& decoder, int threads, int64_t longest_tokens);

// Called at the seams of every layer, by the thread that called `forward`, while the others wait.
// Before attention keys and values are in their pages and the queries known.
enum class Seam : int { before_attend = 0, after_attend = 1 };
struct SeamHook {
  virtual ~SeamHook() = default;
  virtual void operator()(Seam seam, int layer) = 0;  // may throw
};

// `used_bytes`: of its workspace and scratch, what it had a use for; `lost_ns`: what each thread lost of
// `took_ns` to others on its processor.
struct Passed {
  int64_t used_bytes, took_ns;
  std::vector<int64_t> lost_ns;
};
Passed forward(const Decoder& decoder, const Step& step, SeamHook* hook);

}  // namespace kvell
