// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's side: the device over a directory that stands for sysfs.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use tempfile::TempDir;
use vcpufreq::vm::bus::MmioDevice;
use vcpufreq::vm::layout::CPUFREQ_BASE;
use vcpufreq_device::fakes::NullActuator;
use vcpufreq_device::host::{HostRoot, SysfsSource, Tid};
use vcpufreq_device::kvm::PageMapping;
use vcpufreq_device::kvm::ioeventfd::{
    DomainWrites, KernelRegion, PendingWrites, Plan, Unknown, Worker,
};
use vcpufreq_device::kvm::{Doorbell, KvmOffload};
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, Device, DeviceConfig, DomainId, Event, Events, Headroom, Khz,
    MmioRegion, PerfTable, RegisterPages, Util, VcpuId, VcpuSpec, region_size,
};
use vmm_sys_util::eventfd::EventFd;

pub const TABLE_KHZ: [u32; 3] = [600_000, 1_200_000, 1_800_000];

/// Hears nothing.
pub struct Silent;

impl Events for Silent {
    fn record(&self, _event: &Event) {}
}

type BenchDevice = Device<NullActuator, SysfsSource, Silent>;

/// A device with one vCPU, whose thread is the one that makes it.
pub struct Host {
    device: Arc<BenchDevice>,
    _sysfs: TempDir,
}

impl Host {
    pub fn new() -> anyhow::Result<Self> {
        let sysfs = tempfile::tempdir()?;
        let root = sysfs.path();
        let cpus = root.join("sys/devices/system/cpu");
        let possible = fs::read_to_string("/sys/devices/system/cpu/possible")?;
        let last = possible.trim().rsplit(['-', ',']).next().unwrap_or("0");
        for cpu in 0..=last.parse::<u32>()? {
            let cpufreq = cpus.join(format!("cpu{cpu}/cpufreq"));
            fs::create_dir_all(&cpufreq)?;
            fs::write(cpufreq.join("scaling_cur_freq"), "1200000\n")?;
            fs::write(cpufreq.join("cpuinfo_max_freq"), "1800000\n")?;
        }
        fs::write(cpus.join("possible"), possible)?;
        let tid = Tid::current();
        let task = root.join(format!("proc/self/task/{tid}"));
        fs::create_dir_all(&task)?;
        fs::copy(format!("/proc/self/task/{tid}/stat"), task.join("stat"))?;
        let source = SysfsSource::new(&HostRoot::at(root), 1)?;
        source.register_thread(VcpuId(0), tid)?;
        let config = DeviceConfig {
            vcpus: vec![VcpuSpec {
                table: PerfTable::try_from(TABLE_KHZ.map(Khz).to_vec())?,
                capacity: Util::MAX,
                domain: DomainId(0),
            }],
            mode: ClampMode::Floor,
            headroom: Headroom::None,
            visibility: CurPerfVisibility::Exact,
            rate_limit: None,
        };
        let device = Device::new(config, NullActuator, source, Silent)?;
        Ok(Self {
            device: Arc::new(device),
            _sysfs: sysfs,
        })
    }

    /// What answers an access that exits.
    pub fn region(&self) -> Arc<dyn MmioDevice> {
        Arc::new(MmioRegion::new(self.device.clone()))
    }
}

/// The path `ioeventfd` of such a device, with its worker.
pub struct IoeventfdPath {
    pub offload: Arc<KvmOffload>,
    region: Arc<dyn MmioDevice>,
    _worker: Worker,
}

impl IoeventfdPath {
    pub fn new(host: &Host) -> anyhow::Result<Self> {
        let device = host.device.clone();
        let pages = Arc::new(PageMapping::new(region_size(1), false)?);
        device.attach_pages(RegisterPages::new(Box::new(pages.clone()), 1)?)?;
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map(Arc::new);
        let bells = TABLE_KHZ.map(|khz| (VcpuId(0), khz, event()));
        let mut doorbells = Vec::new();
        let mut writes = Vec::new();
        for (vcpu, khz, event) in bells {
            let event = event?;
            writes.push((vcpu, khz, event.clone()));
            let khz = Some(khz);
            doorbells.push(Doorbell { vcpu, khz, event });
        }
        let pending =
            PendingWrites::new(vec![DomainWrites::new(writes, Arc::new(Unknown))?], vec![0]);
        let worker = Worker::start(Plan {
            pending: pending.clone(),
            device: device.clone(),
            vcpus: Arc::new(AtomicU16::new(1)),
            avoid: Vec::new(),
        })?;
        let offload = Arc::new(KvmOffload {
            base: CPUFREQ_BASE,
            pages,
            doorbells: doorbells.into(),
            lost: worker.lost(),
            all_or_nothing: false,
            state: Arc::default(),
        });
        let region = KernelRegion::new(host.region(), device, pending);
        Ok(Self {
            offload,
            region: Arc::new(region),
            _worker: worker,
        })
    }

    pub fn region(&self) -> Arc<dyn MmioDevice> {
        self.region.clone()
    }
}
