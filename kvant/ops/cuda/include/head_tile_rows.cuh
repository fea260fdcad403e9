// The rows of global memory that a (sequence, head tile) is about: a tile of the query heads of one KV head.

#pragma once
#include "include/scheduler.cuh"

struct HeadTileRows {
  int b, head_tile, head;  // sequence; head tile; its KV head
  int row, count;          // the first of its query heads among those of the KV head, and how many there are
  s64 query;               // the first of them among all queries

  DEV HeadTileRows(const WorkTile& work) {
    b = work.b, head_tile = work.head_tile, head = head_tile / Config::QUERY_TILES;
    row = head_tile % Config::QUERY_TILES * Config::TILE_HEADS;
    count = min(Config::TILE_HEADS, Config::GROUP - row);
    query = (s64)b * Config::KV_HEADS * Config::GROUP + head * Config::GROUP + row;
  }
};
