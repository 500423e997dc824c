// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where things are in an arm64 guest's physical address space.
//!
//! Devices lie below RAM; each range starts on a 64 KiB boundary, because a
//! memory slot is made of host pages and those have up to 64 KiB.
//!
//! | from | what |
//! |---|---|
//! | `0x0900_0000` | 16550 console, 4 KiB |
//! | `0x0910_0000` | stolen time, 64 bytes a vCPU, 64 KiB (memory, own slot) |
//! | `0x0920_0000` | virtio disk, 4 KiB |
//! | `0x0a00_0000` | vcpufreq registers, 4 KiB a vCPU; or shared memory and its doorbell |
//! | `0x1000_0000` | GIC distributor, 64 KiB (GICv2: 4 KiB) |
//! | `0x1001_0000` | GIC redistributors, 128 KiB a vCPU (GICv2: CPU interface, 8 KiB) |
//! | `0x4000_0000` | RAM |

/// Most vCPUs that a GICv3 under KVM has room for (`VGIC_V3_MAX_CPUS`).
pub const MAX_VCPUS: usize = 512;

/// Console registers.
pub const UART_BASE: u64 = 0x0900_0000;
/// Bytes of the console's range.
pub const UART_SIZE: u64 = 0x1000;
/// The console's interrupt as a shared peripheral interrupt (GIC INTID 32 + this).
pub const UART_SPI: u32 = 1;

/// Memory that KVM writes stolen time to.
pub const PVTIME_BASE: u64 = 0x0910_0000;
/// Bytes of that memory: 512 vCPUs × 64 bytes fit with room to spare.
pub const PVTIME_SIZE: u64 = 0x1_0000;
/// Bytes of one vCPU's stolen-time structure, its alignment too (Arm DEN0057).
pub const PVTIME_STRIDE: u64 = 64;

/// Registers of the disk.
pub const DISK_BASE: u64 = 0x0920_0000;
/// Bytes of the disk's range.
pub const DISK_SIZE: u64 = 0x1000;
/// The disk's interrupt, as the console's.
pub const DISK_SPI: u32 = 2;

/// First vcpufreq register.
pub const CPUFREQ_BASE: u64 = 0x0a00_0000;

/// GIC distributor.
pub const GICD_BASE: u64 = 0x1000_0000;
/// Bytes of the distributor.
pub const GICD_SIZE: u64 = 0x1_0000;
/// First GIC redistributor.
pub const GICR_BASE: u64 = 0x1001_0000;
/// Bytes of one vCPU's redistributor (two 64 KiB frames).
pub const GICR_STRIDE: u64 = 0x2_0000;
/// Bytes of a GICv2's distributor (`KVM_VGIC_V2_DIST_SIZE`).
pub const GICD_V2_SIZE: u64 = 0x1000;
/// CPU interface of a GICv2, which has no redistributors.
pub const GICC_BASE: u64 = GICR_BASE;
/// Bytes of the CPU interface (`KVM_VGIC_V2_CPU_SIZE`).
pub const GICC_SIZE: u64 = 0x2000;
/// Interrupts of the GIC: 32 private ones and 32 shared.
pub const GIC_IRQS: u32 = 64;

/// First byte of RAM.
pub const RAM_BASE: u64 = 0x4000_0000;

/// Affinity of a vCPU, as in MPIDR_EL1 and the `reg` of its device-tree node.
///
/// KVM's default: 16 vCPUs per Aff0 because a GICv3 SGI addresses 16 targets
/// at once, the rest in Aff1 (`kvm_reset_mpidr`). vCPU 17 is 0x101.
pub fn mpidr_affinity(vcpu: u16) -> u64 {
    let vcpu = u64::from(vcpu);
    (vcpu & 0xf) | ((vcpu >> 4) << 8)
}

#[cfg(test)]
mod tests {
    use vcpufreq_bridge::shm;

    use super::*;

    #[test]
    fn affinity_counts_sixteen_per_cluster() {
        let rows = [(0, 0), (15, 0xf), (16, 0x100), (17, 0x101), (511, 0x1f0f)];
        for (vcpu, affinity) in rows {
            assert_eq!(mpidr_affinity(vcpu), affinity, "vCPU {vcpu}");
        }
    }

    #[test]
    fn ranges_for_the_largest_guest_do_not_overlap() {
        let most = MAX_VCPUS as u64;
        let ranges = [
            (UART_BASE, UART_SIZE),
            (PVTIME_BASE, PVTIME_SIZE),
            (DISK_BASE, DISK_SIZE),
            (CPUFREQ_BASE, shm::size(512) + shm::DOORBELL_PAGE),
            (GICD_BASE, GICD_SIZE),
            (GICR_BASE, most * GICR_STRIDE),
            (RAM_BASE, 1 << 20),
        ];
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
        assert!(ranges.iter().all(|(base, _)| base % 0x1_0000 == 0));
        assert!(most * PVTIME_STRIDE <= PVTIME_SIZE);
    }
}
