// Gap coding: lengths, tables and the packing of positions; nothing here needs an instruction set.
#include "gaps.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace sparseloco {

namespace {

int64_t entry(const uint8_t* table, int64_t group, int bytes) {
    uint32_t size = 0;
    std::memcpy(&size, table + group * bytes, size_t(bytes));  // little-endian, as all machines this runs on
    return size;
}

// A range of groups of one section: what a thread takes at a time.
struct Task {
    int64_t section, first, last;
};

constexpr int64_t kPositionsPerTask = 1 << 15;

void add_tasks(std::vector<Task>* tasks, int64_t section, const GapShape& shape) {
    const int64_t step = std::max<int64_t>(1, kPositionsPerTask / (shape.per_group * shape.kept));
    for (int64_t first = 0; first < shape.groups(); first += step)
        tasks->push_back({section, first, std::min(first + step, shape.groups())});
}

int64_t position(const void* index, bool wide, int64_t i) {
    return wide ? static_cast<const int32_t*>(index)[i] : static_cast<const int16_t*>(index)[i];
}

void put(uint8_t* out, int64_t bit, uint64_t value, int width) {
    for (uint64_t wide = value << (bit & 7); width > 0 && wide; wide >>= 8, bit += 8) out[bit >> 3] |= uint8_t(wide);
}

// One group of the fixed coding; groups share no byte.
int64_t pack_group(const void* index, bool wide, const GapShape& shape, int64_t group, uint8_t* out) {
    uint8_t* unary = out + shape.low_bytes() + group * shape.slot(shape.per_group);
    const uint64_t mask = (uint64_t(1) << shape.low_bits) - 1;
    int64_t at = 0;
    for (int64_t n = group * shape.per_group; n < group * shape.per_group + shape.in_group(group); ++n) {
        int64_t next = 0;
        for (int64_t j = n * shape.kept; j < (n + 1) * shape.kept; ++j) {
            const int64_t here = position(index, wide, j);
            if (here < next || here >= shape.chunk) return n;
            const uint64_t gap = uint64_t(here - next);
            put(out, j * shape.low_bits, gap & mask, shape.low_bits);
            at += int64_t(gap >> shape.low_bits);
            unary[at >> 3] |= uint8_t(1 << (at & 7));
            ++at;
            next = here + 1;
        }
    }
    return -1;
}

// Size of the positions that bytes begin with, from lengths alone.
Fault index_bytes(const uint8_t* data, int64_t bytes, const GapShape& shape, Coding coding, int64_t* size) {
    *size = shape.fixed_bytes();
    if (coding == Coding::FIXED) return {};
    if (bytes < shape.table_bytes()) return {Fault::TABLE_SHORT, bytes};
    *size = shape.table_bytes() + shape.low_bytes();
    for (int64_t group = 0; group < shape.groups(); ++group) {
        const int64_t length = entry(data, group, shape.entry_bytes()), chunks = shape.in_group(group);
        if (length < shape.least(chunks) || length > shape.slot(chunks)) return {Fault::TABLE_ENTRY, group};
        *size += length;
    }
    return {};
}

}  // namespace

Fault open_section(const uint8_t* data, int64_t bytes, const GapShape& shape, Coding coding, bool values,
                   Section* out) {
    int64_t size = 0;
    const Fault fault = index_bytes(data, bytes, shape, coding, &size);
    if (fault.code) return fault;
    if (bytes != size + (values ? shape.code_bytes() + 2 * shape.chunks : 0)) return {Fault::LENGTH, bytes};
    Section section;
    section.shape = shape;
    section.coding = coding;
    section.low = data + (coding == Coding::COMPACT ? shape.table_bytes() : 0);
    section.unary = section.low + shape.low_bytes();
    section.end = data + bytes;
    if (values) {
        section.code = data + size;
        section.scale = section.code + shape.code_bytes();
    }
    if (coding == Coding::COMPACT) {
        section.memory = std::shared_ptr<int64_t[]>(new int64_t[size_t(shape.groups()) + 1]);
        section.memory[0] = 0;
        for (int64_t group = 0; group < shape.groups(); ++group)
            section.memory[group + 1] = section.memory[group] + entry(data, group, shape.entry_bytes());
        section.starts = section.memory.get();
    }
    *out = section;
    return {};
}

Checked check_sections(const Section* sections, int64_t count, int threads) {
    std::vector<Task> tasks;
    for (int64_t i = 0; i < count; ++i) add_tasks(&tasks, i, sections[i].shape);
    std::vector<Fault> faults(tasks.size());
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        faults[size_t(i)] = kernels().gaps.check(sections[task.section], task.first, task.last);
    });
    for (size_t i = 0; i < tasks.size(); ++i)
        if (faults[i].code) return {tasks[i].section, faults[i]};
    return {};
}

void unpack_index(const Section& section, bool wide, void* index, int threads) {
    std::vector<Task> tasks;
    add_tasks(&tasks, 0, section.shape);
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        kernels().gaps.unpack(section, tasks[size_t(i)].first, tasks[size_t(i)].last, wide, index);
    });
}

int64_t pack_fixed(const void* index, bool wide, const GapShape& shape, uint8_t* out, int threads) {
    std::vector<Task> tasks;
    add_tasks(&tasks, 0, shape);
    std::vector<int64_t> wrong(tasks.size(), -1);
    parallel_for(int64_t(tasks.size()), threads, [&](int64_t i) {
        const Task& task = tasks[size_t(i)];
        for (int64_t group = task.first; group < task.last && wrong[size_t(i)] < 0; ++group)
            wrong[size_t(i)] = pack_group(index, wide, shape, group, out);
    });
    for (const int64_t chunk : wrong)
        if (chunk >= 0) return chunk;
    return -1;
}

int64_t recode(const Section& section, uint8_t* out) {
    const GapShape& shape = section.shape;
    const bool to_compact = section.coding == Coding::FIXED;
    const int bytes = shape.entry_bytes();
    uint8_t* low = out + (to_compact ? shape.table_bytes() : 0);
    std::memcpy(low, section.low, size_t(shape.low_bytes()));
    uint8_t* to = low + shape.low_bytes();
    for (int64_t group = 0; group < shape.groups(); ++group) {
        const uint8_t* from = section.unary + section.start(group);
        int64_t length = section.stop(group) - section.start(group);
        if (to_compact)
            while (length > 0 && !from[length - 1]) --length;
        std::memcpy(to, from, size_t(length));
        if (to_compact) {
            const uint32_t size = uint32_t(length);
            std::memcpy(out + group * bytes, &size, size_t(bytes));
        }
        const int64_t room = to_compact ? length : shape.slot(shape.in_group(group));
        std::memset(to + length, 0, size_t(room - length));
        to += room;
    }
    return to - out;
}

}  // namespace sparseloco
