// indexer: stores keys of the sparse indexer, quantised as they are. A warp takes a row, one after
// the other of those that are its own; lane k looks up the slot of the warp's k-th row.

#include "claim.cuh"
#include "index_rows.cuh"
#include "indexer_params.cuh"
#include "lanes.cuh"
#include "numbers.cuh"
#include "paging.cuh"
#include "types.cuh"

namespace cupy_mla {

// The rows of an input type.
template <class InputType>
struct IndexRows {
  using Input = InputType;
};

template <class Format>
__device__ __forceinline__ void indexer(const IndexerParams& p) {
  using Input = typename Format::Input;
  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 warps = static_cast<i32>(blockDim.y);
  const i32 block_start = static_cast<i32>(blockIdx.x) * p.block_tokens;
  const i32 first_token = block_start + static_cast<i32>(threadIdx.y);
  const i32 end_token = min(block_start + p.block_tokens, p.tokens);

  const i32 own_token = first_token + lane * warps;
  IndexPlace place = {nullptr, nullptr};
  if (own_token < end_token) {
    IndexCache cache = p.cache;
    cache.codes.cache = p.codes;
    cache.scales.cache = p.scales;
    const SlotArray slots = {p.slots, p.slot_bytes};
    const i64 slot = load_index(slots, own_token, p.slot_bytes).value(p.slot_bytes);
    place = claim_index_row(cache, {nullptr, nullptr}, 0, own_token, slot, true);
  }
  for (i32 token = first_token, k = 0; token < end_token; token += warps, ++k) {
    const IndexPlace to = {shuffle_pointer(place.codes, k), shuffle_pointer(place.scale, k)};
    if (to.codes == nullptr) continue;
    float values[kIndexRun];
    load_values<Input>(
        p.k + token * p.k_stride + lane * i64{kIndexRun * sizeof(typename Input::Bits)}, values);
    store_index_row(values, to, p.ue8m0 != 0, lane);
  }
}

}  // namespace cupy_mla
