// The rows of global memory that a (sequence, head tile) is about: a tile of the query heads of one KV head.

#pragma once
#include "include/scheduler.cuh"

struct HeadTileRows {
  int b, head_tile, head;  // sequence; head tile; its KV head
  int count;               // query heads
  s64 query;               // the first of them among all queries

  DEV HeadTileRows(const WorkTile& work) {
    b = work.b, head_tile = work.head_tile, head = head_tile / Config::QUERY_TILES;
    const int query_tile = head_tile % Config::QUERY_TILES, query_head = head * Config::GROUP + query_tile * Config::TILE_HEADS;
    count = min(Config::TILE_HEADS, Config::GROUP - query_tile * Config::TILE_HEADS);
    query = (s64)b * Config::KV_HEADS * Config::GROUP + query_head;
  }
};
