"""Cohere's ClientV2: rerank, which it asks for at /v2/rerank."""

import json
import sys

import cohere

client = cohere.ClientV2(base_url=sys.argv[1], api_key="any")
answer = client.rerank(model="rank", query="Hello", documents=["Hello", "Something else", "A third"], top_n=2)

told = {
    "ranked": len(answer.results),
    "strange": sorted({r.index for r in answer.results} - {0, 1, 2}),
    "id": len(answer.id),
    "api": answer.meta.api_version.version,
    "billed": answer.meta.billed_units.search_units,
}
json.dump(told, sys.stdout)
