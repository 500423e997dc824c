// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens to bridge and threads at the moments of a guest's virtual machine.

use std::{os::fd::BorrowedFd, sync::Arc};

use vcpufreq_bridge::BridgeHandle;
use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;

use crate::{
    lifecycle::guardian::GuardianSocket,
    message::warn,
    rt_guest::RtGuest,
    sandbox::{Limits, Sandbox, ThreadClass},
};
use vcpufreq_vm::Hooks;

/// Joins a guest's virtual machine to its bridge, if it has one, and to its real-time side.
pub struct GuestHooks {
    /// The bridge.
    pub bridge: Option<BridgeHandle>,
    /// The real-time side.
    pub rt: RtGuest,
    /// Where the threads go, and what they may use then.
    pub sandbox: Option<(Arc<Sandbox>, Limits)>,
    /// The guardian, whose end is reported once.
    pub guardian: Arc<GuardianSocket>,
}

impl Hooks for GuestHooks {
    fn on_vcpu_thread_start(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        self.rt.enter_partition(vcpu, tid)
    }

    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        self.rt.schedule(vcpu, tid)?;
        if let Some(bridge) = &self.bridge {
            bridge.register_this_thread(vcpu)?;
        }
        match &self.sandbox {
            Some((sandbox, _)) => sandbox.enter(ThreadClass::Vcpu),
            None => Ok(()),
        }
    }

    fn on_disk_thread(&self) {
        if let Some((sandbox, _)) = &self.sandbox {
            sandbox.enter_or_end(ThreadClass::Disk);
        }
    }

    fn on_set_up(&self) -> anyhow::Result<()> {
        let Some((sandbox, limits)) = &self.sandbox else {
            return Ok(());
        };
        self.bridge.iter().for_each(BridgeHandle::confine);
        sandbox.enter_last(*limits)
    }

    fn helper_end(&self) -> Option<BorrowedFd<'_>> {
        (!self.guardian.is_lost()).then(|| self.guardian.ended())
    }

    fn on_helper_end(&self) {
        self.guardian.set_lost();
        // The sandbox lets this program start no other one.
        warn("its guardian has ended; when this program has ended, run vcpufreq cleanup");
    }

    fn before_run(&self) {
        self.bridge.iter().for_each(BridgeHandle::before_run);
    }

    fn on_reset(&self) {
        self.bridge.iter().for_each(BridgeHandle::reset);
    }

    fn on_end(&self) {
        self.bridge.iter().for_each(BridgeHandle::guest_ended);
    }

    fn on_warning(&self, text: &str) {
        warn(text);
    }
}
