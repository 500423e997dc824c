// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq bench`: the same load on the host, in a guest without the
//! bridge, and in one with it; what it got, from the host's trace. And
//! `vcpufreq demo`, every OPP of a guest's request ([`demo()`]).
//!
//! ```text
//! scenario ─▶ steps ─▶ load program, on host or guest ─▶ marks ─┐
//! host's tracepoints: frequencies, context switches ────────────┴▶ measure ─▶ report
//! ```
//!
//! One clock measures all: the host's. The page opens with how many bounds hold, and shows each ramp's
//! draws.

mod args;
mod boot;
mod bounds;
mod calibrate;
mod charged;
mod chart;
mod cycles;
mod demo;
mod derived;
mod duty_cycle;
mod energy;
mod findings;
mod frame_times;
mod freq_limits;
mod guest;
mod latency_page;
mod load_client;
mod load_log;
mod machine;
mod measure;
#[cfg(test)]
mod measure_tests;
mod metric;
mod needed;
mod observed;
mod page;
mod picture;
pub mod piped;
mod progress;
mod recorded_instance;
mod report;
pub mod report_json;
mod residency;
mod rest;
mod row;
mod scenario;
mod scenarios;
mod scx;
mod series;
mod session;
mod spread;
mod target_sampler;
mod text;
mod trace;
pub mod tracefs;
mod undo;
mod variant;
mod workloads;

use anyhow::Context;

pub use args::{BenchArgs, GuestArgs};
use cycles::JobScales;
pub use demo::{DemoArgs, demo, try_opps};
pub use findings::{Findings, write};
use findings::{LACKS, lacks, print};
use freq_limits::FreqLimits;
pub use latency_page::latency_page;
use machine::BenchMachine;
pub use machine::{RT_RECORD, board};
pub use page::{ReportPart, report as report_page};
use progress::Progress;
pub use recorded_instance::{RecordedInstance, has_event};
use report::BenchReport;
use scenario::Scenario;
use scenarios::SCENARIOS;
use session::Session;
use trace::RepeatTrace;
pub use trace::requesting_vcpu;
pub use undo::undo_killed;
pub use variant::Variant;
pub use vcpufreq_load::{IO_DEVICE, NAME as LOAD, NULL_BLK, run as load};
use workloads::{STORAGE, WORKLOADS};

/// Measures, and reports: [`measure()`], with the files of `--out` and `--html`, and the text on
/// stdout. Returns the exit code.
///
/// # Errors
/// Also when a file can't be written.
pub fn bench(args: &BenchArgs, base: u64) -> anyhow::Result<u8> {
    let Some(found) = measure(args, base)? else {
        return Ok(LACKS);
    };
    let json = args
        .out
        .as_deref()
        .map(|out| (out, format!("{:#}\n", found.json)));
    let page = args
        .html
        .as_deref()
        .map(|html| (html, page::bench(&found.json)));
    write(json.into_iter().chain(page))?;
    print(&found.text)?;
    Ok(found.exit_code)
}

/// Measures. `base` is the guest-physical address of the registers in the guests that this program
/// runs. The exit code is 1 when a scenario failed or a figure is from a state that had not settled.
/// `None` on a host that can't measure: stderr then names what it lacks.
///
/// # Errors
/// Whatever keeps all scenarios from being measured, in one line.
pub fn measure(args: &BenchArgs, base: u64) -> anyhow::Result<Option<Findings>> {
    let mut scenarios = chosen(args)?;
    undo::begin()?;
    let mut machine = match BenchMachine::check(args.guests(), args.bridge(), trace::usable().err())
    {
        Ok(machine) => machine,
        Err(missing) => return Ok(lacks(&missing)),
    };
    if let Some(guests) = args.guests().filter(|_| args.qemu.is_none()) {
        guests.print_note();
    }
    machine.speed_switch.clone_from(&args.speed_switch);
    if args.qemu.is_some() {
        machine.guest.qemu.clone_from(&args.qemu);
    }
    machine.guest.disk = scenarios.iter().any(|one| one.needs_disk());
    let mut report = BenchReport::new(&machine, args);
    let _governors = FreqLimits::governors(&machine)?;
    {
        let trace = RepeatTrace::create(base).context("making a trace of the bench's own")?;
        let variants = args.variants();
        let (all, s) = repeats(variants.clone(), &scenarios, args.repeats);
        eprintln!(
            "vcpufreq: {all} repeats, about {}",
            progress::time(s.into())
        );
        let (scales, without) = calibrate::scales((&machine, &trace, args), &scenarios);
        report.set_scales(&scales);
        for (scenario, why) in &without {
            report.failed(scenario, Variant::Vm, why);
        }
        let lacks = |one: &&Scenario| without.iter().any(|(lacks, _)| std::ptr::eq(*lacks, *one));
        scenarios.retain(|one| !lacks(one));
        let mut progress = Progress::new(args.repeats, all);
        for variant in variants {
            let so_far = (&mut report, &mut progress);
            measure_variant(
                (&machine, &trace, args),
                (variant, &scales),
                &scenarios,
                so_far,
            );
        }
    }
    report.derive();
    let json = report.json();
    Ok(Some(Findings {
        text: text::text(&json),
        json,
        exit_code: u8::from(!report.complete()),
    }))
}

/// How many there are in all, if none fails, and the seconds that they take, about.
fn repeats(
    variants: impl Iterator<Item = Variant>,
    scenarios: &[&Scenario],
    wanted: Option<u32>,
) -> (u32, u32) {
    let own = |variant| scenarios.iter().filter(move |one| one.is_for(variant));
    let each = variants.flat_map(own).map(|one| {
        let repeats = one.repeats_of(wanted);
        (repeats, repeats * one.about_s)
    });
    each.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
}

/// What was measured, and how much of all that is.
type SoFar<'a> = (&'a mut BenchReport, &'a mut Progress);
/// What a variant is measured with.
type Setting<'a> = (&'a BenchMachine, &'a RepeatTrace, &'a BenchArgs);

fn measure_variant(
    setting: Setting,
    (variant, scales): (Variant, &JobScales),
    scenarios: &[&'static Scenario],
    (report, progress): SoFar,
) {
    eprintln!("vcpufreq: {}", variant.name());
    let own = scenarios.iter().filter(|one| one.is_for(variant));
    let (boots, mut todo): (Vec<&Scenario>, Vec<&Scenario>) =
        own.copied().partition(|scenario| scenario.boots());
    for scenario in boots {
        let what = (scenario, variant);
        let measured = boot::times((setting.0, setting.2), what, progress);
        progress.ended(scenario);
        match measured {
            Ok(times) => report.add_times(scenario, variant, times),
            Err(error) => report.failed(scenario, variant, &format!("{error:#}")),
        }
    }
    // Those that share a guest one after the other.
    todo.sort_by_key(|scenario| scenario.guests());
    while let Some(first) = todo.first() {
        let guests = first.guests();
        let done = match Session::start(setting.0, variant, guests, setting.2) {
            Ok(session) => {
                let what = (variant, scales, todo.as_slice());
                measure_in(session, setting, what, (report, progress))
            }
            Err(error) => {
                let alike = todo.iter().filter(|one| one.guests() == guests);
                alike
                    .map(|one| {
                        report.failed(one, variant, &format!("{error:#}"));
                        progress.ended(one);
                    })
                    .count()
            }
        };
        todo.drain(..done);
    }
}

/// Measures scenarios until one fails, or one needs another guest; how many
/// there were. A scenario that fails may leave the guest unusable.
fn measure_in(
    mut session: Session,
    (machine, trace, _): Setting,
    (variant, scales, todo): (Variant, &JobScales, &[&'static Scenario]),
    (report, progress): SoFar,
) -> usize {
    let mut done = 0;
    let alike = |one: &&&Scenario| one.guests() == todo[0].guests();
    for scenario in todo.iter().filter(alike) {
        done += 1;
        session.scale(scales.scale_of(&scenario.title()));
        let measured = session.measure(scenario, trace, progress);
        progress.ended(scenario);
        match measured {
            Ok(observed) => report.add(machine, scenario, variant, &observed),
            Err(error) => {
                report.failed(scenario, variant, &format!("{error:#}"));
                return done;
            }
        }
    }
    if let Err(error) = session.end() {
        eprintln!(
            "vcpufreq: the guest of '{}' did not end well: {error:#}",
            variant.name()
        );
    }
    done
}

fn chosen(args: &BenchArgs) -> anyhow::Result<Vec<&'static Scenario>> {
    let names = &args.scenario;
    if names.is_empty() && args.ablation {
        return Ok(WORKLOADS.iter().filter(|one| is_here(one, args)).collect());
    }
    if names.is_empty() {
        return Ok(SCENARIOS.iter().filter(|one| is_here(one, args)).collect());
    }
    let all = || SCENARIOS.iter().chain(WORKLOADS).chain(STORAGE);
    let mut known: Vec<&str> = all().map(|one| one.name).collect();
    known.dedup();
    let called = |name: &&String| all().any(|one| one.is_called(name));
    if let Some(unknown) = names.iter().find(|name| !called(name)) {
        anyhow::bail!("no scenario '{unknown}'; there are: {}", known.join(", "));
    }
    let asked = |one: &&Scenario| names.iter().any(|name| one.is_called(name));
    let chosen: Vec<_> = all().filter(asked).collect();
    let measures = |variant: Variant| chosen.iter().any(|one| one.is_for(variant));
    let asked = |variant: &Variant| args.variant.contains(variant);
    let idle = |variant: &Variant| !measures(*variant);
    if let Some(variant) = args.variants().filter(asked).find(idle) {
        anyhow::bail!(
            "none of these scenarios is measured on {}; name another one with --scenario",
            variant.name()
        );
    }
    Ok(chosen)
}

/// Whether a scenario can be measured here; a line if it can't.
fn is_here(scenario: &Scenario, args: &BenchArgs) -> bool {
    let own_ramdisk = args.guest.of_host || args.guest.kernel.is_none();
    let lacks = scenario.lacks(own_ramdisk);
    if let Some(why) = &lacks {
        eprintln!("vcpufreq: {} is left out: {why}", scenario.title());
    }
    lacks.is_none()
}

#[cfg(test)]
mod tests {
    //! Promises: the time that is announced is that of each repeat on each variant.
    use super::*;

    #[test]
    fn the_time_of_all_repeats_is_announced() {
        let of = |names: &[&str], wanted| {
            let called = |one: &&Scenario| names.iter().any(|name| one.is_called(name));
            let scenarios: Vec<_> = SCENARIOS.iter().filter(called).collect();
            repeats(
                [Variant::Host, Variant::VmBridge].into_iter(),
                &scenarios,
                wanted,
            )
        };
        assert_eq!(of(&["big-ramp"], None), (10, 40));
        assert_eq!(of(&["big-ramp", "contended.infer50"], Some(2)), (8, 40));
        // It is measured on the bridge alone, and at most three times.
        assert_eq!(of(&["contended.steal_untold"], None), (3, 12));
    }
}
