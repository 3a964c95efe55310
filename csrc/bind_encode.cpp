#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "bind.h"

namespace sparseloco {

namespace {

// Anchor [N, C], live parameter, residual [N, C] or None, geometry, kept values per chunk, section.
using PyJob = std::tuple<Array, Array, std::optional<Array>, std::vector<int64_t>, int64_t, std::optional<Array>>;

bool is_chunks(const Array& a, int64_t chunks, int64_t chunk) {
    const bool shaped = a.ndim() == 2 && int64_t(a.shape(0)) == chunks && int64_t(a.shape(1)) == chunk;
    return shaped && is_float32(a) && contiguous(a);
}

bool is_chunk(const Geometry& g) {
    return g.rows >= 1 && g.cols >= 1 && g.rows <= kLargestChunk && g.cols <= kLargestChunk / g.rows;
}

void check_arrays(const PyJob& given, int64_t chunks, int64_t chunk) {
    const auto& [start, live, residual, numbers, kept, out] = given;
    require(kept >= 1 && kept <= chunk,
            "kept=" + std::to_string(kept) + ": must be between 1 and the chunk size; see kept_per_chunk");
    require(is_chunks(start, chunks, chunk),
            "start=wrong array: must be contiguous float32 [N, C]; see kernels/native.py");
    require(!residual || is_chunks(*residual, chunks, chunk),
            "residual=wrong array: must be contiguous float32 [N, C]; see kernels/native.py");
}

EncodeJob job_of(const PyJob& given, bool with_section) {
    const auto& [start, live, residual, numbers, kept, out] = given;
    EncodeJob job{};
    job.where = geometry_of(numbers);
    require(is_float32(live) || is_bf16(live),
            "live=dtype: must be float32 or bfloat16; use the definition for others");
    require(is_chunk(job.where), "chunk=" + std::to_string(job.where.rows) + "x" + std::to_string(job.where.cols) +
                                     ": must have 1 to 32768 values; use the definition for larger ones");
    require(inside(job.where, extent(live)),
            "geometry=outside of the tensor: must lie in it; see kernels/geometry.py");
    const int64_t chunks = job.where.chunks(), chunk = job.where.rows * job.where.cols;
    check_arrays(given, chunks, chunk);
    job.section = FixedSection(chunks, kept, chunk);
    if (with_section) {
        const int64_t bytes = job.section.bytes();
        require(out && out->dtype() == nb::dtype<uint8_t>() && contiguous(*out) && int64_t(out->size()) == bytes,
                "out=wrong array: must be " + std::to_string(bytes) + " bytes; see section_bytes");
        job.out = static_cast<uint8_t*>(out->data());
    }
    job.start = static_cast<const float*>(start.data());
    job.live = live.data();
    job.bf16 = is_bf16(live);
    job.residual = residual ? static_cast<float*>(residual->data()) : nullptr;
    return job;
}

std::vector<EncodeJob> jobs_of(const std::vector<PyJob>& given, bool with_section) {
    std::vector<EncodeJob> jobs;
    for (const PyJob& job : given) jobs.push_back(job_of(job, with_section));
    return jobs;
}

// A tensor as rows: one if it is contiguous, else one for each entry of dim 0.
Values values_of(const Array& a) {
    require(is_float32(a) || is_bf16(a),
            "live=dtype: must be float32 or bfloat16; use the definition for others");
    const int64_t size = int64_t(a.size());
    if (size == 0 || contiguous(a)) return {a.data(), is_bf16(a), 1, size, size};
    const int64_t rows = int64_t(a.shape(0)), cols = size / rows;
    int64_t expected = 1;
    for (size_t d = a.ndim(); d-- > 1; expected *= int64_t(a.shape(d)))
        require(a.shape(d) == 1 || a.stride(d) == expected,
                "live=strided: must be contiguous behind its first dim; use the definition for others");
    require(a.stride(0) >= cols, "live=overlapping: must have separate rows; use the definition for others");
    return {a.data(), is_bf16(a), rows, cols, a.stride(0)};
}

std::vector<float> max_magnitudes_of(const std::vector<Array>& given, int threads) {
    std::vector<Values> jobs;
    for (const Array& a : given) jobs.push_back(values_of(a));
    std::vector<uint32_t> bits(jobs.size());
    {
        nb::gil_scoped_release released;
        max_magnitudes(jobs.data(), int64_t(jobs.size()), threads, bits.data());
    }
    std::vector<float> result;
    for (const uint32_t u : bits) result.push_back(float_of(u > 0x7f800000u ? 0x7f800000u : u));
    return result;
}

void encode_top_k(const std::vector<PyJob>& given, double decay, double low, double high, int threads) {
    const std::vector<EncodeJob> jobs = jobs_of(given, true);
    const EncodeRule rule = {float(decay), float(low), float(high), float((low + high) / 2)};
    nb::gil_scoped_release released;
    encode_all(jobs.data(), int64_t(jobs.size()), rule, threads);
}

void ef_pass_all(const std::vector<PyJob>& given, double decay, int threads) {
    const std::vector<EncodeJob> jobs = jobs_of(given, false);
    nb::gil_scoped_release released;
    ef_passes(jobs.data(), int64_t(jobs.size()), float(decay), threads);
}

}  // namespace

void bind_encode(nb::module_& m) {
    m.def("section_bytes", [](int64_t chunks, int64_t kept, int64_t chunk) {
        require(chunks >= 0 && kept >= 1 && kept <= chunk && chunk <= kLargestChunk,
                "section=sizes: must have 1 <= K <= C <= 32768; use the definition for others");
        return FixedSection(chunks, kept, chunk).bytes();
    }, nb::arg("chunks"), nb::arg("kept"), nb::arg("chunk"), "Bytes of one block's section in the fixed coding.");
    m.def("max_magnitudes", max_magnitudes_of, nb::arg("live"), nb::arg("threads"),
          "Largest magnitude of each float32 or bfloat16 tensor; NaN counts as infinity, nothing as 0.");
    m.def("encode_top_k", encode_top_k, nb::arg("jobs"), nb::arg("decay"), nb::arg("low"), nb::arg("high"),
          nb::arg("threads"), "Encode blocks into their sections and update their residuals.");
    m.def("ef_pass", ef_pass_all, nb::arg("jobs"), nb::arg("decay"), nb::arg("threads"),
          "Error feedback alone: the least that an encoder can cost.");
}

}  // namespace sparseloco
