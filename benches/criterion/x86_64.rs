// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The benchmarks on x86-64, with the virtual machine of the library's example.

#[path = "../../vmm-device/bridge/examples/attach/main.rs"]
#[allow(dead_code)]
mod attach;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use attach::BASE;
use attach::guest::run_vcpu;
use criterion::Criterion;
use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vcpufreq_bridge::{KvmSlot, PageMapping};
use vcpufreq_device::{PageMemory, VcpuId};
use vcpufreq_host::fakes::FakeHost;

const CODE: u64 = 0x1000;
const TABLE_KHZ: [u32; 2] = [600_000, 1_800_000];

/// What a turn of the guest's loop does: 16-bit code, with DS at the device and ES at memory.
const EMPTY: &[u8] = &[];
/// `mov eax, es:[0x8000]`
const LOAD: &[u8] = &[0x26, 0x66, 0xa1, 0x00, 0x80];
/// `mov eax, ds:[0]`
const READ: &[u8] = &[0x66, 0xa1, 0x00, 0x00];
/// `xor eax, edx; mov ds:[4], eax`: two entries of the table in turn.
const WRITE: &[u8] = &[0x66, 0x31, 0xd0, 0x66, 0xa3, 0x04, 0x00];

/// Name, the loop, and whether KVM answers what it can.
const ROWS: [(&str, &[u8], bool); 6] = [
    ("bare-loop", EMPTY, false),
    ("bare-load", LOAD, false),
    ("exit-read", READ, false),
    ("exit-write", WRITE, false),
    ("ioeventfd-read", READ, true),
    ("ioeventfd-write", WRITE, true),
];

/// All that this machine can run.
pub fn paths(criterion: &mut Criterion) {
    let kvm = match Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm)) {
        Ok(kvm) => kvm,
        Err(error) => return println!("SKIP: no usable /dev/kvm: {error}"),
    };
    for row in ROWS {
        if let Err(error) = measure(criterion, &kvm, row) {
            return println!("SKIP: {error:#}");
        }
    }
}

fn measure(
    criterion: &mut Criterion,
    kvm: &Kvm,
    (name, code, by_kvm): (&str, &[u8], bool),
) -> anyhow::Result<()> {
    let host = FakeHost::of_this_machine(1_200_000, 1_800_000);
    let builder = attach::builder(&host.root())?;
    let bridge = match by_kvm {
        true => builder.ioeventfd(false).start(),
        false => builder.start(),
    }?;
    let handle = bridge.handle();
    let vm = Arc::new(kvm.create_vm()?);
    let ram = attach::guest::ram(&vm)?;
    let mut vcpu = guest(&vm, &ram, code)?;
    let attachment = handle.attach(KvmSlot { vm, slot: 1 });
    handle.register_this_thread(VcpuId(0))?;
    handle.before_run();

    let mmio = bridge.mmio();
    let (mut exits, mut accesses) = (0, 0);
    let mut group = criterion.benchmark_group("paths");
    group
        .sample_size(50)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|turns| {
            accesses += turns;
            let mut took = Duration::ZERO;
            let mut left = turns;
            while left > 0 {
                let now = u32::try_from(left).unwrap_or(u32::MAX);
                left -= u64::from(now);
                rewind(&vcpu, now).expect("KVM sets registers");
                let start = Instant::now();
                exits += run_vcpu(&mut vcpu, &*mmio).expect("the guest halts");
                took += start.elapsed();
            }
            took
        });
    });
    group.finish();
    handle.guest_ended();
    drop(attachment);
    let _ = bridge.stop();
    let each = exits as f64 / (accesses.max(1)) as f64;
    println!("{{\"bench\":\"{name}\",\"accesses\":{accesses},\"exits_each\":{each}}}");
    Ok(())
}

/// A vCPU, and in its memory a loop of this code, `dec ecx; jnz`, and `hlt`.
fn guest(vm: &VmFd, ram: &PageMapping, turn: &[u8]) -> anyhow::Result<VcpuFd> {
    let back = u8::try_from(turn.len() + 4)?.wrapping_neg();
    let mut code = turn.to_vec();
    code.extend([0x66, 0x49, 0x75, back, 0xf4]);
    code.resize(code.len().next_multiple_of(4), 0x90);
    let words = code.chunks_exact(4).flat_map(<[u8; 4]>::try_from);
    let memory = PageMemory::words(ram);
    let memory = memory.get(usize::try_from(CODE)? / 4..).context("no RAM")?;
    for (place, bytes) in memory.iter().zip(words) {
        place.store(u32::from_le_bytes(bytes), Relaxed);
    }
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    (sregs.es.base, sregs.es.selector) = (0, 0);
    sregs.ds.base = BASE;
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs)?;
    Ok(vcpu)
}

/// Puts the vCPU in front of so many turns.
fn rewind(vcpu: &VcpuFd, turns: u32) -> Result<(), kvm_ioctls::Error> {
    let [low, high] = TABLE_KHZ;
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rflags: 2,
        rcx: turns.into(),
        rax: low.into(),
        rdx: (low ^ high).into(),
        ..kvm_regs::default()
    })
}
