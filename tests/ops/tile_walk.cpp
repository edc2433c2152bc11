// Walks tiles (tiles.cuh) on the host, block after block, for random groups: every output has one writer, every tile its own operands.
// Usage: walk SEED ROUNDS; prints "ok" and how much was checked, or what went wrong. TILES is tiles.cuh, of which lanes see every group.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

using std::max, std::min;
#define __device__
#define __forceinline__ inline
struct Coordinate { int x; };
static Coordinate threadIdx{0}, blockIdx{0}, gridDim{0};
static int __reduce_add_sync(unsigned, int sum) { return sum; }
typedef unsigned int u32;
#include TILES

static std::mt19937 source;
static int up_to(int most) { return (int)(source() % (unsigned)(most + 1)); }

static int fail(const char* what, const Tile& t) {
  std::printf("%s: group %d, rows %d from %d, column %d, tall %d, half %d, empty %d\n", what, t.group, t.rows, t.out_row, t.column, t.tall,
              t.half, t.empty);
  return 1;
}

int main(int count, char** words) {
  if (count != 3) return 2;
  source.seed((unsigned)std::atoi(words[1]));
  long tiles = 0;
  for (int round = std::atoi(words[2]); round > 0; --round) {
    const int groups = 1 + up_to(8), N = 32 * (1 + up_to(59)), blocks = 1 + up_to(139), most = up_to(1) ? 700 : 6000;
    std::vector<int> ends(groups), sizes(groups), order(groups);
    for (int& size : sizes) size = up_to(2) ? up_to(most) : 0;
    std::partial_sum(sizes.begin(), sizes.end(), ends.begin());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return sizes[a] > sizes[b]; });
    const int owned = ends.back(), rows = WGRAD ? 32 * (1 + up_to(59)) : owned + (up_to(1) ? up_to(900) : 0);
    Problem p{};
    p.ends = ends.data(), p.order = order.data(), p.groups = groups, p.rows = rows, p.N = N, p.K = WGRAD ? owned : 256;

    const int all_rows = WGRAD ? groups * rows : rows;
    std::vector<unsigned char> written((size_t)all_rows * N);
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      Tile t{};
      for (Walk walk(p); walk.next(t); ++tiles) {
        const int begin = t.group > 0 && t.group <= groups ? ends[t.group - 1] : 0, high = t.tall && !t.half ? 256 : 128;
        const bool none = WGRAD ? sizes[t.group] == 0 : t.group == groups;
        if (t.empty != none || (t.empty && t.steps)) return fail("what is empty", t);
        if (WGRAD ? t.k != begin || t.b_row != t.column || t.a_row + t.group * rows != t.out_row
                  : t.a_row != t.out_row || t.b_row != t.group * N + t.column || (!none && t.rows > 0 && t.a_row + t.rows != ends[t.group]))
          return fail("operands", t);
        for (int y = t.out_row; y < t.out_row + min(high, t.rows); ++y)
          for (int x = t.column; x < min(N, t.column + (t.tall || t.half ? 128 : 256)); ++x)
            if (y >= all_rows || written[(size_t)y * N + x]++) return fail("written twice or beyond", t);
      }
    }
    for (int y = 0; y < all_rows; ++y) {
      const bool wanted = !SKIP || (WGRAD ? sizes[y / rows] > 0 : y < owned);
      for (int x = 0; x < N; ++x)
        if (written[(size_t)y * N + x] != wanted) return std::printf("row %d, column %d: written %d times\n", y, x, written[(size_t)y * N + x]), 1;
    }
  }
  std::printf("ok %ld\n", tiles);
}
