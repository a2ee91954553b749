"""Elastic aggregation as a wrapper."""

from rayfl.methods.base import Method
from rayfl.methods.shared.elastic import Elastic, ElasticHyper
from rayfl.wrappers.base import Wrapper


class ElasticAggregation(Wrapper, ElasticHyper):
    """Elastic aggregation (Chen et al., CVPR 2023) around a method; `method.elastic` is its short form."""

    name = "elastic"
    splits = Elastic.splits

    def around(self, method: Method) -> Method:
        return Elastic(method, ElasticHyper(**self.model_dump()))
