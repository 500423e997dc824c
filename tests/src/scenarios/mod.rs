// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scenarios: each is a function from a settled host to a verdict, its checks and what was
//! counted.

#[cfg(feature = "scenarios")]
pub mod bench;
#[cfg(feature = "bpf")]
pub mod bpf;
pub mod device;
#[cfg(feature = "scenarios")]
pub mod kills;
#[cfg(feature = "scenarios")]
pub mod kunit;
#[cfg(feature = "scenarios")]
pub mod models;
#[cfg(feature = "scenarios")]
pub mod paths;
#[cfg(feature = "scenarios")]
pub mod planted;
#[cfg(feature = "scenarios")]
pub mod qemu;
#[cfg(feature = "scenarios")]
pub mod rt;

use anyhow::{Result, bail};
use vcpufreq_tests::LabVerdict;

use crate::harness::boost;
use crate::harness::fair_server;
use crate::harness::plan::Plan;
#[cfg(feature = "scenarios")]
use crate::harness::uclamp;

/// Carries out a scenario by name.
pub fn run(name: &str, plan: &Plan) -> Result<LabVerdict> {
    if let Some(name) = fair_server::scenario_without(name) {
        return fair_server::without(|| run(name, plan));
    }
    match boost::scenario_with(name) {
        Some(name) => boost::with(|| scenario(name, plan)),
        None => scenario(name, plan),
    }
}

fn scenario(name: &str, plan: &Plan) -> Result<LabVerdict> {
    match name {
        "demo" => device::demo::run(plan),
        name => other(name, plan),
    }
}

#[cfg(not(feature = "scenarios"))]
fn other(_name: &str, _plan: &Plan) -> Result<LabVerdict> {
    bail!("this agent has the demo alone")
}

#[cfg(feature = "scenarios")]
fn other(name: &str, plan: &Plan) -> Result<LabVerdict> {
    #[cfg(feature = "bpf")]
    if let Some(result) = with_bpf(name, plan) {
        return result;
    }
    match name {
        "boot" => device::basics::boot(plan),
        "governor" => device::basics::governor(plan),
        "board" => bench::board::run(),
        "board:demo" => bench::board::demo_alone(),
        "board:ends" => bench::board::ends_alone(),
        "board:report" => bench::board::report(),
        name if name.starts_with("board:kills") => kills::run(plan, name),
        "capacity" => device::basics::capacity(plan),
        "opps-exact" => device::opps::exact(plan),
        "opps-floor" => device::opps::floor(plan),
        "no-dip" => device::dips::no_dip(plan),
        "no-dip:fifo" => device::dips::no_dip_on_fifo(plan),
        "dip-by-actuator" => device::dips::dip_by_actuator(plan),
        "repeat" => device::opps::repeat(plan),
        "thread-actuator" => device::thread_actuator::run(plan),
        "domain" | "domain:both" => device::domain::run(plan, name),
        "caps" => device::caps::run(plan),
        "default-run" => device::default_run::run(plan),
        "hotplug" => device::hotplug::run(plan),
        "unpinned" => paths::unpinned::run(plan),
        "unpinned:rt" => paths::unpinned::beside_real_time(plan),
        "driver" => device::driver::run(plan),
        "restart" => device::basics::restart(plan),
        "doctor" => device::basics::doctor(plan),
        "flood" | "flood:worker" | "flood:uart" => device::flood::run(plan, name),
        "guest-limits" => device::limits::run(plan),
        "memory" => device::memory::run(plan),
        "metrics" => device::metrics::run(plan),
        "no-exit" => paths::no_exit::run(plan),
        "no-uclamp" => device::no_uclamp::run(plan),
        "order" => paths::order::run(plan),
        "worker-place" => paths::worker_place::run(plan),
        "in-force" => paths::in_force::run(plan),
        "paths" => paths::cost::run(plan),
        "peer" => bench::peer::run(),
        "stats" => device::stats::run(plan),
        "steal" => device::steal::run(plan),
        "systemd" => device::systemd::run(plan),
        "trace" => device::trace::run(plan),
        "guest-trace" => device::guest_trace::run(plan),
        "perfetto" => device::perfetto::run(),
        #[cfg(feature = "bpf")]
        "policy" => device::policies::run(plan),
        "tune" => device::tune::run(plan),
        "two-guests" => device::two_guests::run(plan),
        "host-fails" => device::failure::host_fails(plan),
        "pin-offline" => device::bad_input::run(plan),
        "kill" => device::kill::run(plan),
        "protected" => device::protected::run(plan),
        "disk" => device::disk::run(plan),
        "disk-not-shared" => device::disk::not_shared(plan),
        #[cfg(target_arch = "aarch64")]
        "sandbox" => device::sandbox::run(plan),
        #[cfg(target_arch = "aarch64")]
        "sandbox:attacks" => device::sandbox::attacked(plan),
        "debian-guest" => qemu::debian::run(),
        "libvirt" => qemu::libvirt::run(plan),
        "libvirt-rt" => qemu::libvirt::real_time::run(plan),
        "uclamp" => clamps(),
        "idle" => models::idle::run(plan),
        "guest-facts" => device::guest_facts::run(plan),
        "guest-facts:stolen" => device::guest_facts::stolen(plan),
        "ramps" => bench::program::ramps(plan),
        "rt-app" => models::rt_app::run(plan),
        "speed" => models::speed::run(plan),
        "speed-guest" => models::speed::guest(plan),
        name if name.starts_with("qemu") => of_qemu(name, plan),
        name if name.starts_with("rt-") && name != "rt-app" => real_time(name, plan),
        "planted" => planted::run(),
        "kunit" => kunit::run(plan),
        _ if name.split(':').next() == Some("bench") => bench::program::run(plan, name),
        _ if name.split(':').next() == Some("many-vcpus") => device::many_vcpus::run(plan, name),
        _ => bail!("no such scenario"),
    }
}

/// Those of QEMU's guests.
#[cfg(feature = "scenarios")]
fn of_qemu(name: &str, plan: &Plan) -> Result<LabVerdict> {
    match name {
        "qemu" => qemu::run(),
        "qemu-control" => qemu::control::run(),
        "qemu-life" => qemu::life::run(plan),
        "qemu-moves" => qemu::moves::run(plan),
        "qemu-ram" => qemu::ram::run(),
        "qemu-service" => qemu::service::run(),
        "qemu-efi" => qemu::efi::run(plan),
        "qemu-deaths" => qemu::deaths::run(plan),
        #[cfg(feature = "bpf")]
        "qemu-late" => qemu::late::run(plan),
        _ => bail!("no such scenario"),
    }
}

/// Those of real-time guests.
#[cfg(feature = "scenarios")]
fn real_time(name: &str, plan: &Plan) -> Result<LabVerdict> {
    match name {
        "rt-guest" => rt::guest::run(plan),
        "rt-io" => rt::io::run(plan),
        "rt-latency" => rt::latency::run(plan),
        "rt-loop" => rt::periodic_loop::run(plan),
        "rt-qemu" => rt::served::run(plan),
        name if name.starts_with("rt-qemu:kills") => rt::kills::run(name),
        "rt-settings" => rt::settings::run(plan),
        "rt-settings:kills" => rt::settings::kills(plan),
        "rt-standard" => rt::standard::run(plan),
        _ => bail!("no such scenario"),
    }
}

#[cfg(feature = "bpf")]
fn with_bpf(name: &str, plan: &Plan) -> Option<Result<LabVerdict>> {
    match name {
        "attach" => Some(paths::attach::run()),
        "fallbacks" => Some(paths::fallbacks::run(plan)),
        "fallbacks:start" => Some(paths::fallbacks::at_start(plan)),
        "fallbacks:reset" => Some(paths::fallbacks::reset(plan)),
        _ => bpf::run(name, plan),
    }
}

/// Whether clamps take effect on every CPU, after all that was done before.
#[cfg(feature = "scenarios")]
fn clamps() -> Result<LabVerdict> {
    let wrong = uclamp::cpus_that_disobey()?;
    Ok(LabVerdict::default()
        .check_none("each CPU obeys", &wrong)
        .figure("cpus_that_disobey", wrong))
}
