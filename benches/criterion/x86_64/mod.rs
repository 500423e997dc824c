// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The benchmarks on x86-64.

mod guest;
mod host;

use std::time::{Duration, Instant};

use criterion::Criterion;
use kvm_ioctls::{Kvm, VcpuExit};
use vcpufreq::vm::bus::Bus;
use vcpufreq::vm::kvm_vm::FreeSlot;
use vcpufreq::vm::layout::CPUFREQ_BASE;
use vcpufreq_device::region_size;

use guest::{Guest, Loop};
use host::{Host, IoeventfdPath};

/// All that this machine can run.
pub fn paths(criterion: &mut Criterion) {
    let kvm = match Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm)) {
        Ok(kvm) => kvm,
        Err(error) => return println!("SKIP: no usable /dev/kvm: {error}"),
    };
    if let Err(error) = measure(criterion, &kvm) {
        println!("SKIP: {error:#}");
    }
}

fn measure(criterion: &mut Criterion, kvm: &Kvm) -> anyhow::Result<()> {
    let mut group = criterion.benchmark_group("paths");
    group
        .sample_size(50)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    let host = Host::new()?;
    let kernel = IoeventfdPath::new(&host)?;
    let rows = [
        ("bare-loop", Loop::Empty, &host, None),
        ("bare-load", Loop::Load, &host, None),
        ("exit-read", Loop::Read, &host, None),
        ("exit-write", Loop::Write, &host, None),
        ("ioeventfd-read", Loop::Read, &host, Some(&kernel)),
        ("ioeventfd-write", Loop::Write, &host, Some(&kernel)),
    ];
    for (name, code, host, path) in rows {
        let mut guest = Guest::new(kvm, code)?;
        let slot = FreeSlot {
            vm: &guest.vm(),
            number: guest.next_slot(),
        };
        let skip = |text: &str| println!("SKIP: {text}");
        let _attached = path.map(|path| path.offload.attach(&slot, &skip));
        let mut bus = Bus::new();
        let region = path.map_or_else(|| host.region(), IoeventfdPath::region);
        bus.insert(CPUFREQ_BASE, region_size(1), region)?;
        let (mut exits, mut accesses) = (0, 0);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|turns| {
                accesses += turns;
                let (took, left) = run(&mut guest, turns, &bus);
                exits += left;
                took
            });
        });
        let each = if accesses == 0 {
            0.0
        } else {
            exits as f64 / accesses as f64
        };
        println!("{{\"bench\":\"{name}\",\"accesses\":{accesses},\"exits_each\":{each}}}");
    }
    group.finish();
    Ok(())
}

/// `turns` of the guest's loop: how long they took, and how often it left.
fn run(guest: &mut Guest, turns: u64, bus: &Bus) -> (Duration, u64) {
    let mut exits = 0;
    let mut took = Duration::ZERO;
    let mut left = turns;
    while left > 0 {
        let now = u32::try_from(left).unwrap_or(u32::MAX);
        left -= u64::from(now);
        guest.rewind(now).expect("KVM sets registers");
        let start = Instant::now();
        loop {
            match guest.vcpu.run().expect("KVM runs the guest") {
                VcpuExit::MmioRead(address, data) => bus.read(address, data),
                VcpuExit::MmioWrite(address, data) => bus.write(address, data),
                VcpuExit::Hlt => break,
                other => panic!("the guest left with {other:?}"),
            }
            exits += 1;
        }
        took += start.elapsed();
    }
    (took, exits)
}
