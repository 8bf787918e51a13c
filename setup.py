"""Maps the source rooms to one package: python/flashrope is `flashrope`, triton_kernels/ is `flashrope.triton_kernels`."""

from setuptools import setup

setup(
    package_dir={
        "flashrope": "python/flashrope",
        "flashrope.triton_kernels": "triton_kernels",
    },
    packages=[
        "flashrope",
        "flashrope.backends",
        "flashrope.experiments",
        "flashrope.triton_kernels",
    ],
    package_data={"flashrope": ["py.typed"]},
)
