// Python face of settling and of the digest.
#include "bind_settle.h"
#include "kernels.h"
#include "settle.h"

namespace sparseloco {

namespace {

// A job and what keeps its memory alive while the interpreter runs on.
struct Held {
    std::vector<Array> arrays;
    std::vector<Bytes> bytes;
    std::vector<std::vector<Section>> sections;
    std::vector<SettleJob> jobs;
};

float* floats_of(const Array& a, const GapShape& shape, const char* name) {
    if (!is_float32(a) || int64_t(a.size()) != shape.chunks * shape.chunk || !contiguous(a))
        throw nb::value_error((std::string(name) + ": must be contiguous float32 [N, C]").c_str());
    return static_cast<float*>(a.data());
}

void check_live(const Array& live, const Geometry& where, const GapShape& shape) {
    require(is_float32(live) || is_bf16(live), "live: must be float32 or bfloat16");
    require(where.rows >= 1 && where.cols >= 1 && where.rows <= shape.chunk && where.cols <= shape.chunk &&
                where.rows * where.cols == shape.chunk && inside(where, extent(live)) &&
                where.chunks() == shape.chunks,
            "geometry: must lie inside the live tensor and have the chunks of the anchor");
}

bool same_layout(const Array& a, const Array& b) {
    if (a.dtype() != b.dtype() || a.ndim() != b.ndim()) return false;
    for (size_t d = 0; d < a.ndim(); ++d)
        if (a.shape(d) != b.shape(d) || (a.shape(d) > 1 && a.stride(d) != b.stride(d))) return false;
    return true;
}

// (anchor, live, geometry, K, velocity or None, snapshot or None, [section bytes])
void add_job(Held& held, const nb::tuple& item, const std::vector<int>& codings, Merge merge) {
    const auto array = [&](size_t i) {
        held.arrays.push_back(nb::cast<Array>(item[i]));
        return held.arrays.back();
    };
    SettleJob job{};
    const Array anchor = array(0), live = array(1);
    if (anchor.ndim() != 2) throw nb::value_error("anchor: must be contiguous float32 [N, C]");
    job.shape = gap_shape(int64_t(anchor.shape(0)), nb::cast<int64_t>(item[3]), int64_t(anchor.shape(1)));
    job.anchor = floats_of(anchor, job.shape, "anchor");
    job.where = geometry_of(nb::cast<std::vector<int64_t>>(item[2]));
    check_live(live, job.where, job.shape);
    job.live = live.data();
    job.bf16 = is_bf16(live);
    if (!item[4].is_none()) job.velocity = floats_of(array(4), job.shape, "velocity");
    if (!item[5].is_none()) {
        const Array snapshot = array(5);
        require(same_layout(snapshot, live), "snapshot: must have the type, shape and strides of live");
        job.snapshot = snapshot.data();
    } else if (merge == Merge::CARRY) {
        throw nb::value_error("snapshot: must be given to carry progress");
    }
    const nb::list sections = nb::cast<nb::list>(item[6]);
    if (sections.size() != codings.size()) throw nb::value_error("sections: must be one per peer");
    held.sections.emplace_back(codings.size());
    for (size_t p = 0; p < codings.size(); ++p) {
        held.bytes.push_back(nb::cast<Bytes>(sections[p]));
        const Fault fault = open_section(data_of(held.bytes.back()), int64_t(held.bytes.back().size()), job.shape,
                                         coding_of(codings[p]), true, &held.sections.back()[p]);
        if (fault.code) throw nb::value_error("section: must be checked before it is settled; call check_sections");
    }
    held.jobs.push_back(job);
}

void hold(Held& held, const nb::list& items, const std::vector<int>& codings, Merge merge) {
    for (size_t i = 0; i < items.size(); ++i) add_job(held, nb::cast<nb::tuple>(items[i]), codings, merge);
    for (size_t i = 0; i < held.jobs.size(); ++i) held.jobs[i].sections = held.sections[i].data();
}

// Numbers as outer.Sgd rounds them.
SettlePlan plan_of(const std::vector<int64_t>& weights, std::pair<double, double> levels, int over,
                   const std::vector<double>& outer, bool nesterov, int merge, double alpha) {
    SettlePlan plan{};
    plan.weights = weights.data();
    plan.peers = int64_t(weights.size());
    for (const int64_t weight : weights) {
        if (weight < 1 || weight >= (1 << 29)) throw nb::value_error("weights: must be from 1 to 2^29 - 1");
        plan.total_weight += weight;
    }
    if (outer.size() != 3 || over < 0 || over > 1 || merge < 0 || merge > 2)
        throw nb::value_error("plan: must have (lr, momentum, weight decay), a mean of 0 or 1, a merge of 0 to 2");
    plan.low = float(levels.first);
    plan.high = float(levels.second);
    plan.over = Mean(over);
    plan.lr = float(outer[0]);
    plan.momentum = float(outer[1]);
    plan.decay = outer[2] != 0 ? float(1.0 - plan.lr * outer[2]) : 1.0;
    plan.nesterov = nesterov;
    plan.general = outer[1] != 0 || outer[2] != 0;
    plan.merge = Merge(merge);
    plan.alpha = alpha;
    return plan;
}

nb::tuple settle_of(const nb::list& items, const std::vector<int64_t>& weights, const std::vector<int>& codings,
                    std::pair<double, double> levels, int over, const std::vector<double>& outer, bool nesterov,
                    int merge, double alpha, int threads) {
    const SettlePlan plan = plan_of(weights, levels, over, outer, nesterov, merge, alpha);
    if (codings.size() != weights.size()) throw nb::value_error("codings: must be one per peer");
    Held held;
    hold(held, items, codings, plan.merge);
    for (const SettleJob& job : held.jobs)
        if (plan.peers && (outer[1] != 0) != (job.velocity != nullptr))
            throw nb::value_error("velocity: must be given with momentum, and only then");
    Settled done;
    {
        nb::gil_scoped_release release;
        done = settle_all(plan, held.jobs, threads);
    }
    return nb::make_tuple(done.squares, done.failed);
}

void apply_of(const nb::list& items, int threads) {
    Held held;
    hold(held, items, {}, Merge::REPLACE);
    nb::gil_scoped_release release;
    apply_all(held.jobs, threads);
}

nb::tuple digest_of(const nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>& words,
                    uint64_t salt, int threads) {
    uint64_t lanes[2];
    {
        nb::gil_scoped_release release;
        digest(reinterpret_cast<const uint32_t*>(words.data()), int64_t(words.shape(0)), int64_t(words.shape(1)), salt,
               threads, lanes);
    }
    return nb::make_tuple(lanes[0], lanes[1]);
}

}  // namespace

void bind_settle(nb::module_& m) {
    bind_gaps(m);
    m.def("settle", settle_of, nb::arg("jobs"), nb::arg("weights"), nb::arg("codings"), nb::arg("levels"),
          nb::arg("over"), nb::arg("outer"), nb::arg("nesterov"), nb::arg("merge"), nb::arg("alpha"),
          nb::arg("threads"), "Sums of squares of the updates, and the first job that failed or -1.");
    m.def("apply_pass", apply_of, nb::arg("jobs"), nb::arg("threads"),
          "Reads and writes anchors and writes live parameters, and nothing else.");
    m.def("digest", digest_of, nb::arg("words"), nb::arg("salt"), nb::arg("threads"),
          "Both lanes of a matrix of words.");
}

}  // namespace sparseloco
