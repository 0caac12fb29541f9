// query: RoPE and fp8 of the queries of attention and of the indexer.
//
// A thread block takes some heads of one token, either of attention or of the indexer.

#include "attention_heads.cuh"
#include "index_heads.cuh"
#include "paging.cuh"
#include "query_params.cuh"
#include "types.cuh"

namespace cupy_mla {

// The rows of an input type.
template <class InputType>
struct QueryRows {
  using Input = InputType;
};

template <class Format>
__device__ __forceinline__ void query(const QueryParams& p) {
  using Input = typename Format::Input;
  const i32 token = static_cast<i32>(divide(blockIdx.x, p.token_blocks));
  const i32 block = static_cast<i32>(blockIdx.x - token * p.token_blocks.value);
  const LoadedIndex position = load_index({p.positions, p.position_bytes}, token, p.position_bytes);
  if (block < p.mqa_blocks) {
    store_attention<Input>(p, token, block, position);
  } else {
    store_indexer<Input>(p, token, block - p.mqa_blocks, position);
  }
}

}  // namespace cupy_mla
