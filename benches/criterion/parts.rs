// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cost of an access' parts without the kernel: the decoding of a register, the policy's
//! arithmetic, a read and a write of the device with fakes. And the cost of a guest's device tree.

use std::hint::black_box;
use std::sync::Arc;

use criterion::Criterion;
use vcpufreq_device::fakes::{FixedSource, NullActuator};
use vcpufreq_device::{
    ClampMode, Device, DeviceConfig, DomainId, Headroom, Khz, MmioRegion, NoEvents, PcpuPerf,
    PerfTable, REG_CUR_PERF, REG_SET_PERF, ReadReg, Util, VcpuId, VcpuSpec, WriteReg, clamp,
    performance,
};
use vcpufreq_dt::{
    CpuFacts, CpuPlace, CpufreqRegion, Machine, MachineFacts, Opp, OppTable, RegionKind,
};

const KHZ: [u32; 5] = [700_000, 1_200_000, 1_700_000, 2_200_000, 2_800_000];

const PCPU: PcpuPerf = PcpuPerf {
    pcpu: 0,
    khz: Khz(1_700_000),
    reference: Khz(2_800_000),
    capacity: Util::MAX,
};

fn spec() -> VcpuSpec {
    VcpuSpec {
        table: PerfTable::try_from(KHZ.map(Khz).to_vec()).expect("a table that rises"),
        capacity: Util::MAX,
        domain: DomainId(0),
    }
}

fn registers(criterion: &mut Criterion) {
    criterion.bench_function("decode", |bencher| {
        bencher.iter(|| {
            let read = ReadReg::decode(black_box(REG_CUR_PERF), 4);
            (read, WriteReg::decode(black_box(REG_SET_PERF), 4))
        });
    });
}

fn policy(criterion: &mut Criterion) {
    let spec = spec();
    criterion.bench_function("clamp of a request", |bencher| {
        bencher.iter(|| {
            let asked = Khz(black_box(1_200_000));
            clamp(&spec, asked, ClampMode::Exact, Headroom::None)
        });
    });
    criterion.bench_function("performance on a pCPU", |bencher| {
        bencher.iter(|| performance(&spec, black_box(&PCPU)));
    });
}

fn device(criterion: &mut Criterion) {
    let config = DeviceConfig::new(vec![spec()]);
    let device = Device::new(config, NullActuator, FixedSource::new(PCPU), NoEvents);
    let region = MmioRegion::new(Arc::new(device.expect("a configuration that is right")));
    criterion.bench_function("device read", |bencher| {
        let mut data = [0; 4];
        bencher.iter(|| {
            region.read(black_box(REG_CUR_PERF), &mut data);
            data
        });
    });
    let by = Some(VcpuId(0));
    for (name, khz) in [
        ("device write, the clamp in force", [KHZ[1], KHZ[1]]),
        ("device write, another clamp", [KHZ[1], KHZ[2]]),
    ] {
        let mut khz = khz.into_iter().cycle();
        criterion.bench_function(name, |bencher| {
            bencher.iter(|| {
                let asked = khz.next().unwrap_or_default().to_le_bytes();
                region.write_by(by, black_box(REG_SET_PERF), &asked);
            });
        });
    }
}

/// Eight CPUs in two clusters, with tables, power and the device's node.
fn facts() -> MachineFacts {
    let cpu = |number: u32| CpuFacts {
        reg: number.into(),
        capacity: if number < 4 { 329 } else { 1024 },
        khz_max: KHZ[4],
        opp_table: Some(usize::from(number >= 4)),
        place: CpuPlace {
            cluster: number / 4,
            ..CpuPlace::default()
        },
        real_time: false,
    };
    let opp = |khz| Opp {
        khz,
        uv: Some(900_000),
        uw: Some(khz / 10),
    };
    let table = OppTable {
        opps: KHZ.map(opp).to_vec(),
        shared: true,
    };
    MachineFacts {
        cpus: (0..8).map(cpu).collect(),
        opp_tables: vec![table.clone(), table],
        standby: true,
        cpufreq: Some(CpufreqRegion {
            base: 0x0a00_0000,
            size: 0x1_0000,
            kind: RegionKind::Registers,
        }),
    }
}

fn device_tree(criterion: &mut Criterion) {
    let facts = facts();
    criterion.bench_function("device tree of 8 CPUs", |bencher| {
        bencher.iter(|| {
            let machine =
                Machine::try_from(black_box(facts.clone())).expect("facts that are right");
            vcpufreq_dt::dtb(&machine)
        });
    });
}

/// As criterion's macros have it, which make a function without documentation.
fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    registers(&mut criterion);
    policy(&mut criterion);
    device(&mut criterion);
    device_tree(&mut criterion);
    criterion.final_summary();
}
