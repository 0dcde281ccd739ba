// Draft trees from matches: DraftTrie of specdec/spec/trie.py and the growth of ngram.py and suffix.py, compiled.
// No Python, no torch. Cells and orders are the reference's; the tests compare whole trees.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "token_index.h"

namespace specdec {

struct DraftTrie {  // node 0 is the root; vectors by node
  std::vector<int32_t> tokens, parents, depths, cells, first, next, degree;  // first child, next sibling, number of children
  std::vector<double> scores;
  size_t limit, width;

  DraftTrie(int32_t root, size_t most, size_t widest) : limit(most), width(widest) { push(root, -1, 0, 1.0, -1); }

  int32_t child(int32_t node, int32_t token) const {
    int32_t c = first[node];
    while (c >= 0 && tokens[c] != token) c = next[c];
    return c;
  }

  int32_t add(int32_t node, int32_t token, int32_t cell, double rate) {  // -1 when the tree or the node is full
    if (tokens.size() >= limit || (size_t)degree[node] >= width) return -1;
    int32_t made = (int32_t)tokens.size();
    push(token, node, depths[node] + 1, scores[node] * rate, cell);
    next[made] = first[node], first[node] = made, degree[node]++;
    return made;
  }

  // The likeliest nodes, best path first, then parents before children.
  DraftTrie select(size_t nodes) const {
    std::vector<int32_t> order(tokens.size()), number(tokens.size(), -1);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
    order.resize(std::min(nodes, order.size()));
    std::vector<char> rest(tokens.size(), 0);
    for (int32_t i : order) rest[i] = 1;
    DraftTrie out(tokens[0], limit, width);
    number[0] = 0, rest[0] = 0;
    for (int32_t node = 0, best; (best = likeliest(node, rest)) >= 0; node = best) copy(best, &out, &number), rest[best] = 0;
    for (int32_t i = 0; i < (int32_t)tokens.size(); i++)
      if (rest[i]) copy(i, &out, &number);
    return out;
  }

 private:
  int32_t likeliest(int32_t node, const std::vector<char>& among) const {  // child with the highest score, the older among equals
    int32_t best = -1;
    for (int32_t c = first[node]; c >= 0; c = next[c])
      if (among[c] && (best < 0 || scores[c] >= scores[best])) best = c;  // siblings are listed newest first
    return best;
  }
  void copy(int32_t node, DraftTrie* out, std::vector<int32_t>* number) const {
    (*number)[node] = (int32_t)out->tokens.size();
    out->push(tokens[node], (*number)[parents[node]], depths[node], scores[node], cells[node]);
  }
  void push(int32_t token, int32_t parent, int32_t depth, double score, int32_t cell) {
    tokens.push_back(token), parents.push_back(parent), depths.push_back(depth), cells.push_back(cell);
    first.push_back(-1), next.push_back(-1), degree.push_back(0), scores.push_back(score);
  }
};

struct Match {
  int32_t length;
  const int32_t* tokens;  // what followed
  int32_t count;
};

struct Growth {  // bounds of a tree, and the rates of acceptance by cell
  int32_t depth, vocab;
  std::vector<int32_t> end_ids;
  const double* rates;
  int64_t cells;

  bool usable(int32_t token) const { return 0 <= token && token < vocab; }
  bool ends(int32_t token) const { return std::find(end_ids.begin(), end_ids.end(), token) != end_ids.end(); }
};

// trie.py: match_bucket and depth_bucket.
inline int match_bucket(int n) { return n <= 4 ? n - 1 : n <= 6 ? 4 : n <= 8 ? 5 : n <= 15 ? 6 : n <= 31 ? 7 : 8; }
inline int depth_bucket(int d) { return d <= 3 ? d - 1 : d <= 5 ? 3 : d <= 10 ? 4 : 5; }

// ngram.py: one continuation after the other, the longest match first.
struct NgramRule {
  static constexpr int kMatches = 9, kDepths = 6, kRanks = 3, kCells = kMatches * kDepths * kRanks;
  int32_t longest;  // matches longer than this are equals

  void operator()(DraftTrie* trie, std::vector<Match> matches, const Growth& g) const {
    auto key = [&](const Match& m) { return std::min(m.length, longest); };
    std::stable_sort(matches.begin(), matches.end(), [&](const Match& a, const Match& b) { return key(a) > key(b); });
    for (const Match& m : matches) {
      int32_t node = 0;
      for (int32_t i = 0; i < m.count; i++) {
        int32_t known = trie->child(node, m.tokens[i]);
        if (known < 0) {
          if (!g.usable(m.tokens[i])) break;
          int rank = std::min(trie->degree[node], kRanks - 1);
          int cell = (match_bucket(m.length) * kDepths + depth_bucket(trie->depths[node] + 1)) * kRanks + rank;
          if ((known = trie->add(node, m.tokens[i], cell, g.rates[cell])) < 0) break;
        }
        node = known;
        if (g.ends(m.tokens[i])) break;
      }
      if (trie->width == 1 && trie->tokens.size() > 1) return;
    }
  }
};

// suffix.py: matches vote, level by level.
struct SuffixRule {
  static constexpr int kMatches = 9, kShares = 6, kVotes = 3, kCells = kMatches * kShares * kVotes;
  int32_t factor, bonus;  // longest draft = factor * matched length + bonus
  double floor;           // score below which a branch is not grown

  static int cell(int length, int votes, int total) {
    double share = (double)votes / total;
    int shares = share <= 0.05 ? 0 : share <= 0.2 ? 1 : share <= 0.45 ? 2 : share <= 0.7 ? 3 : share < 1.0 ? 4 : 5;
    return (match_bucket(length) * kShares + shares) * kVotes + (votes == 1 ? 0 : votes < 4 ? 1 : 2);
  }

  void operator()(DraftTrie* trie, std::vector<Match> matches, const Growth& g) const {
    int32_t longest = 0;
    for (const Match& m : matches) longest = std::max(longest, m.length);
    std::erase_if(matches, [&](const Match& m) { return 2 * m.length < longest; });
    int32_t depth = std::min(g.depth, factor * longest + bonus);
    std::vector<Open> open = {{0, std::move(matches)}};
    while (!open.empty()) {
      Open now = std::move(open.back());
      open.pop_back();
      int32_t at = trie->depths[now.node];
      std::erase_if(now.voters, [&](const Match& m) { return m.count <= at; });
      if (at < depth && !now.voters.empty()) vote(trie, now, at, g, &open);
    }
  }

 private:
  struct Open {
    int32_t node;
    std::vector<Match> voters;
  };
  struct Candidate {
    int32_t token, votes, length;
  };

  void vote(DraftTrie* trie, const Open& now, int32_t at, const Growth& g, std::vector<Open>* open) const {
    std::vector<Candidate> candidates;
    for (const Match& m : now.voters) {
      auto same = [&](const Candidate& c) { return c.token == m.tokens[at]; };
      auto c = std::find_if(candidates.begin(), candidates.end(), same);
      if (c == candidates.end()) candidates.push_back({m.tokens[at], 1, m.length});
      else c->votes++, c->length = std::max(c->length, m.length);
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.votes > b.votes; });
    candidates.resize(std::min(candidates.size(), trie->width));
    size_t first = open->size();
    for (const Candidate& c : candidates) {
      int where = cell(c.length + at, c.votes, (int)now.voters.size());
      if (!g.usable(c.token) || trie->scores[now.node] * g.rates[where] < floor) continue;
      int32_t made = trie->add(now.node, c.token, where, g.rates[where]);
      if (made < 0 || g.ends(c.token)) continue;
      open->push_back({made, now.voters});
      std::erase_if(open->back().voters, [&](const Match& m) { return m.tokens[at] != c.token; });
    }
    std::reverse(open->begin() + first, open->end());  // the best branch is taken up first
  }
};

}  // namespace specdec
