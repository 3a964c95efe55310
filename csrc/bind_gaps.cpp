// Python face of gap coding: sections and index parts as bytes.
#include "bind_settle.h"

namespace sparseloco {

namespace {

// The first fault of sections given as (bytes, N, K, C), as (section, code, at); None if there is none.
nb::object check_sections_of(const nb::list& items, int coding, bool values, int threads) {
    std::vector<Bytes> held;
    std::vector<Section> sections(items.size());
    Checked found;
    for (size_t i = 0; i < items.size(); ++i) {
        const nb::tuple item = nb::cast<nb::tuple>(items[i]);
        held.push_back(nb::cast<Bytes>(item[0]));
        const GapShape shape = gap_shape(nb::cast<int64_t>(item[1]), nb::cast<int64_t>(item[2]),
                                         nb::cast<int64_t>(item[3]));
        const Fault fault = open_section(data_of(held.back()), int64_t(held.back().size()), shape, coding_of(coding),
                                         values, &sections[i]);
        if (fault.code) return nb::make_tuple(i, fault.code, fault.at);
    }
    {
        nb::gil_scoped_release release;
        found = check_sections(sections.data(), int64_t(sections.size()), threads);
    }
    if (found.section < 0) return nb::none();
    return nb::make_tuple(found.section, found.fault.code, found.fault.at);
}

Section opened(const Bytes& data, const GapShape& shape, int coding) {
    Section section;
    const Fault fault = open_section(data_of(data), int64_t(data.size()), shape, coding_of(coding), false, &section);
    if (fault.code) throw nb::value_error("section: must be checked before it is decoded; call check_sections");
    return section;
}

bool is_wide(const Array& index, const GapShape& shape) {
    const bool wide = index.dtype() == nb::dtype<int32_t>();
    if (!wide && (index.dtype() != nb::dtype<int16_t>() || shape.chunk > 32768))
        throw nb::value_error("index: must be int32, or int16 for chunks of at most 32768 values");
    if (int64_t(index.size()) != shape.chunks * shape.kept || !contiguous(index))
        throw nb::value_error("index: must be contiguous [N, K]");
    return wide;
}

void unpack_index_into(const Bytes& data, int64_t n, int64_t k, int64_t c, int coding, const Array& index,
                       int threads) {
    const GapShape shape = gap_shape(n, k, c);
    const Section section = opened(data, shape, coding);
    const bool wide = is_wide(index, shape);
    nb::gil_scoped_release release;
    unpack_index(section, wide, index.data(), threads);
}

nb::bytes bytes_of(const uint8_t* data, int64_t size) { return nb::bytes(data, size_t(size)); }

nb::bytes recoded(const Section& section) {
    const GapShape& shape = section.shape;
    std::vector<uint8_t> out(size_t(shape.table_bytes() + shape.fixed_bytes()));
    int64_t size = 0;
    {
        nb::gil_scoped_release release;
        size = recode(section, out.data());
    }
    return bytes_of(out.data(), size);
}

// Bytes, or the first chunk whose positions do not ascend below C.
nb::object pack_index(const Array& index, int64_t n, int64_t k, int64_t c, int coding, int threads) {
    const GapShape shape = gap_shape(n, k, c);
    const bool wide = is_wide(index, shape);
    std::vector<uint8_t> out(size_t(shape.fixed_bytes()), 0);
    int64_t wrong = -1;
    {
        nb::gil_scoped_release release;
        wrong = pack_fixed(index.data(), wide, shape, out.data(), threads);
    }
    if (wrong >= 0) return nb::int_(wrong);
    if (coding_of(coding) == Coding::FIXED) return bytes_of(out.data(), int64_t(out.size()));
    Section section;
    open_section(out.data(), int64_t(out.size()), shape, Coding::FIXED, false, &section);
    return recoded(section);
}

nb::bytes recode_index(const Bytes& data, int64_t n, int64_t k, int64_t c, int coding) {
    return recoded(opened(data, gap_shape(n, k, c), coding));
}

}  // namespace

void bind_gaps(nb::module_& m) {
    m.def("check_sections", check_sections_of, nb::arg("sections"), nb::arg("coding"), nb::arg("values"),
          nb::arg("threads"), "First fault of [(bytes, N, K, C)], as (section, code, at), or None.");
    m.def("unpack_index", unpack_index_into, nb::arg("data"), nb::arg("n"), nb::arg("k"), nb::arg("c"),
          nb::arg("coding"), nb::arg("index"), nb::arg("threads"), "Positions into [N, K].");
    m.def("pack_index", pack_index, nb::arg("index"), nb::arg("n"), nb::arg("k"), nb::arg("c"), nb::arg("coding"),
          nb::arg("threads"), "Bytes of positions, or the first chunk whose positions do not ascend below C.");
    m.def("recode_index", recode_index, nb::arg("data"), nb::arg("n"), nb::arg("k"), nb::arg("c"), nb::arg("coding"),
          "An index part in the other coding.");
}

}  // namespace sparseloco
