// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs' arithmetic, run in the kernel, equals that of `vmm-device`: for every kHz from 0
//! to above the maximum of a usual vCPU, and for spread values of unusual ones.

use anyhow::{Context, Result};
use libbpf_rs::{MapCore as _, MapFlags, Object, ObjectBuilder, ProgramInput};
use serde_json::json;
use vcpufreq_device::{
    Clamp, ClampMode, DomainId, Headroom, Khz, PcpuPerf, PerfTable, SET_PERF_KHZ, Util, VcpuSpec,
    clamp, nearest_entry, performance,
};
use vcpufreq_tests::LabVerdict;

const OBJECT: &str = "/lab/bpf/arith.bpf.o";
/// Results of one call, and bytes of each, as the object has them.
const RESULTS: u32 = 16_384;
const RESULT: usize = 20;
const POLICY: usize = 336;
/// Where a policy has its table, and the table's length.
const TABLE: usize = 80;
const TABLE_LEN: usize = 72;
const CPU: usize = 8;

/// A vCPU on a pCPU.
struct Case {
    perf_max: u32,
    /// The frequency that its capacity refers to.
    reference: u32,
    capacity: u16,
    clamp: ClampMode,
    headroom: Headroom,
    pcpu: (u16, u32),
    /// Entries of its table, 1 to 3.
    entries: usize,
    /// First kHz, distance, and how many calls.
    values: (u32, u32, u32),
}

const fn case(perf_max: u32, capacity: u16, pcpu: (u16, u32), values: (u32, u32, u32)) -> Case {
    Case {
        perf_max,
        reference: perf_max,
        capacity,
        clamp: ClampMode::Ceilings,
        headroom: Headroom::None,
        pcpu,
        entries: 3,
        values,
    }
}

/// 2.8 million values in calls of 16 384.
const EVERY: (u32, u32, u32) = (0, 1, 172);
/// All 32 bits, in steps that are prime.
const SPREAD: (u32, u32, u32) = (1, 131_071, 2);

const CASES: [Case; 11] = [
    case(2_800_000, 1024, (1024, 2_800_000), EVERY),
    Case {
        clamp: ClampMode::Exact,
        headroom: Headroom::Quarter,
        ..case(1_800_000, 329, (1024, 2_800_000), (0, 1, 111))
    },
    case(1_900_000, 381, (1024, 2_700_000), SPREAD),
    Case {
        entries: 1,
        ..case(2_800_000, 1024, (329, 1_800_000), SPREAD)
    },
    // Boost above the frequency that a capacity of 1024 refers to, and below that of 371.
    Case {
        reference: 2_841_600,
        ..case(2_956_800, 1024, (1024, 2_841_600), (2_700_000, 1, 17))
    },
    Case {
        reference: 2_841_600,
        headroom: Headroom::Quarter,
        clamp: ClampMode::Floor,
        ..case(2_208_000, 371, (1024, 2_956_800), SPREAD)
    },
    case(u32::MAX, 1024, (1024, u32::MAX), SPREAD),
    case(u32::MAX, 1, (1024, 1), SPREAD),
    case(6, 1024, (1, u32::MAX), SPREAD),
    case(4_294_967_291, 1023, (1021, 4_294_967_279), SPREAD),
    case(
        3_000_000,
        7,
        (1024, 4_294_967_279),
        (u32::MAX - 16_383, 1, 1),
    ),
];

pub fn run() -> Result<LabVerdict> {
    let object = ObjectBuilder::default().open_file(OBJECT)?.load()?;
    let (mut compared, mut wrong) = (0_u64, Vec::new());
    for case in &CASES {
        let (from, step, calls) = case.values;
        for call in 0..calls {
            let from = from.wrapping_add(call.wrapping_mul(RESULTS).wrapping_mul(step));
            let results = compute(&object, &case.inputs(from, step))?;
            for (n, result) in (0..RESULTS).zip(results.chunks_exact(RESULT)) {
                let khz = from.wrapping_add(n.wrapping_mul(step));
                let seen = [0, 4, 8, 12, 16].map(|at| word(result, at));
                let expected = case.expected(khz)?;
                compared += 1;
                if seen != expected && wrong.len() < 5 {
                    wrong.push(json!({ "khz": khz, "seen": seen, "expected": expected }));
                }
            }
        }
    }
    let figures = json!({ "compared": compared, "wrong": wrong });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no result is wrong", &wrong)
        .check("enough are compared", compared > 4_500_000, compared))
}

fn compute(object: &Object, inputs: &[u8]) -> Result<Vec<u8>> {
    let map = |name: &str| object.maps().find(|map| map.name() == name);
    let key = 0_u32.to_ne_bytes();
    let map_in = map("inputs").context("no inputs")?;
    map_in.update(&key, inputs, MapFlags::ANY)?;
    let program = object.progs_mut().next().context("no program")?;
    let done = program.test_run(ProgramInput::default())?;
    anyhow::ensure!(done.return_value == 0, "the program gave up");
    let results = map("results").context("no results")?;
    results.lookup(&key, MapFlags::ANY)?.context("no result")
}

impl Case {
    /// The maximum, and below it what makes up the entries, as far as it allows.
    fn table(&self) -> Vec<u32> {
        let all = [self.perf_max / 3, self.perf_max / 2, self.perf_max];
        all[all.len() - self.entries..].to_vec()
    }

    fn nearest(&self, khz: u32) -> Result<u32> {
        let entries = self.table().into_iter().map(Khz).collect::<Vec<_>>();
        let spec = VcpuSpec {
            table: PerfTable::try_from(entries)?,
            capacity: Util::MAX,
            domain: DomainId(0),
        };
        Ok(nearest_entry(&spec, Khz(khz)).0)
    }

    /// `struct inputs`: a policy, a pCPU, the first value and the step.
    fn inputs(&self, from: u32, step: u32) -> Vec<u8> {
        let (num, den) = match self.headroom {
            Headroom::None => (1, 1),
            Headroom::Quarter => (4, 5),
        };
        let mode = match self.clamp {
            ClampMode::Floor => 0,
            ClampMode::Exact => 1,
            ClampMode::Ceilings => 2,
        };
        let mut bytes = Vec::new();
        // The limit is of use where others are added.
        let (max, reference, limit) = (self.perf_max, self.reference, 0);
        for value in [max, reference, self.capacity.into(), limit, num, den, mode] {
            bytes.extend(value.to_ne_bytes());
        }
        bytes.resize(TABLE, 0);
        for entry in self.table() {
            bytes.extend(entry.to_ne_bytes());
        }
        bytes[TABLE_LEN] = u8::try_from(self.entries).unwrap_or(0);
        bytes.resize(POLICY, 0);
        for value in [self.pcpu.0.into(), self.pcpu.1] {
            bytes.extend(value.to_ne_bytes());
        }
        bytes.resize(POLICY + CPU, 0);
        for value in [from, step] {
            bytes.extend(value.to_ne_bytes());
        }
        bytes
    }

    /// Clamp, what is granted, cur_perf (0 where it is unknown), the nearest entry, and the clamp
    /// within bounds that follow from the kHz.
    fn expected(&self, khz: u32) -> Result<[u32; 5]> {
        let spec = VcpuSpec {
            table: PerfTable::try_from(vec![Khz(self.perf_max)])?.referring_to(Khz(self.reference)),
            capacity: Util::saturating(self.capacity.into()),
            domain: DomainId(0),
        };
        let (mode, asked) = match self.clamp {
            ClampMode::Ceilings if khz > SET_PERF_KHZ => (ClampMode::Exact, khz & SET_PERF_KHZ),
            mode => (mode, khz),
        };
        let decision = clamp(&spec, Khz(asked), mode, self.headroom);
        let pcpu = PcpuPerf {
            pcpu: 0,
            khz: Khz(khz),
            reference: Khz(self.pcpu.1),
            capacity: Util::saturating(self.pcpu.0.into()),
        };
        let bounds = Clamp {
            min: Util::saturating((khz & 511).into()),
            max: Util::saturating((512 + ((khz >> 9) & 511)).into()),
        };
        let perf = performance(&spec, &pcpu).map_or(0, |khz| khz.0);
        Ok([
            decision.clamp.bits(),
            decision.granted.0,
            perf,
            self.nearest(khz)?,
            decision.clamp.within(bounds).bits(),
        ])
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let four = bytes.get(at..).and_then(|rest| rest.first_chunk());
    four.copied().map_or(0, u32::from_ne_bytes)
}
