// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq top`: the table, alive, with rates.

use std::{
    io::{self, IsTerminal, Read, Write},
    os::fd::AsRawFd,
    time::Duration,
};

use anyhow::{Context, bail};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

use super::{Stats, VcpuStats, VmmSocket, ask, residency, text};
use crate::sys::terminal_rows;
use vcpufreq_vm::sys;

type Count = fn(&VcpuStats) -> u64;

/// The columns behind the table's: title, and what is counted a second.
const RATES: [(&str, Count); 2] = [
    ("REQ/S", |vcpu| vcpu.counts.requests),
    ("EXITS/S", VcpuStats::exits),
];

/// The other screen, its cursor hidden and its lines cut at the edge; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// From the first line on, over what is there.
const HOME: &str = "\x1b[H";
/// The rest of the line, or of the screen, is empty.
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_REST: &str = "\x1b[J";
/// Keys that end it: q and Ctrl-C; and escape, which begins other keys' sequences too.
const QUIT: [u8; 2] = [b'q', 3];
const ESCAPE: u8 = 0x1b;

/// Shows the VMM at `socket` until `q`, Ctrl-C or the VMM's end.
///
/// # Errors
/// When there is no terminal, or no VMM any more.
pub fn top(socket: &VmmSocket, every: Duration) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        bail!("top needs a terminal for input and output; vcpufreq stats needs none");
    }
    let mut now = ask(socket)?;
    let mut before = now.clone();
    let _screen = Screen::enter().context("can't set up the terminal")?;
    loop {
        let rows = terminal_rows().unwrap_or(u16::MAX);
        let lines = screen(&before, &now).into_iter().take(rows.into());
        let shown = lines.collect::<Vec<_>>().join(CLEAR_LINE);
        print(&format!("{HOME}{shown}\x1b[K{CLEAR_REST}"))?;
        if quits_within(every)? {
            return Ok(());
        }
        before = now;
        now = ask(socket)?;
    }
}

/// A terminal without line editing, echo and signal keys, until it is dropped.
struct Screen(Termios);

impl Screen {
    fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut settings = before.clone();
        settings
            .local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &settings)?;
        let screen = Self(before);
        print(ENTER)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that has gone away needs neither.
        let _ = print(LEAVE);
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// Whether a key ends it within that time; other keys end the wait.
fn quits_within(every: Duration) -> io::Result<bool> {
    let [typed] = sys::poll([Some(io::stdin().as_raw_fd())], Some(every))?;
    if !typed {
        return Ok(false);
    }
    let mut keys = [0; 16];
    let len = io::stdin().lock().read(&mut keys)?;
    // The end of the input is the end of the terminal.
    Ok(match &keys[..len] {
        [] | [ESCAPE] => true,
        [ESCAPE, ..] => false,
        keys => keys.iter().any(|key| QUIT.contains(key)),
    })
}

/// The headline, the titles, a line for each vCPU, and those of times at OPPs meanwhile.
#[must_use]
pub fn screen(before: &Stats, now: &Stats) -> Vec<String> {
    let titles = RATES.map(|(title, _)| format!(" {title:>8}")).concat();
    let rows = now.vcpus.iter().enumerate().map(|(index, vcpu)| {
        let rates = RATES.map(|(_, count)| {
            let of_vcpu = |stats: &Stats| stats.vcpus.get(index).map_or(0, count);
            format!(" {:>8}", rate(before, now, of_vcpu))
        });
        text::row(vcpu) + &rates.concat()
    });
    let head = [headline(before, now), text::titles() + &titles];
    let times = residency::lines(Some(before), now);
    let tunings = text::tunings(now);
    head.into_iter()
        .chain(rows)
        .chain(tunings)
        .chain(text::decider(now))
        .chain(times)
        .collect()
}

fn headline(before: &Stats, now: &Stats) -> String {
    let [requests, exits] = RATES.map(|(_, count)| {
        let of_all = |stats: &Stats| stats.vcpus.iter().map(count).fold(0, u64::saturating_add);
        rate(before, now, of_all)
    });
    format!(
        "vcpufreq, process {}: {} vCPUs, {requests} requests and {exits} exits a second; q ends",
        now.pid,
        now.vcpus.len(),
    )
}

/// How often something happened a second between two moments.
fn rate(before: &Stats, now: &Stats, count: impl Fn(&Stats) -> u64) -> u64 {
    let happened = u128::from(count(now).saturating_sub(count(before)));
    let ns = u128::from(now.at_ns.saturating_sub(before.at_ns)).max(1);
    u64::try_from(happened * 1_000_000_000 / ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    //! Promises: what is drawn has the figures, the rates and the times at OPPs between two
    //! moments.

    use super::*;
    use crate::stats::OppTime;

    fn at(at_ns: u64, requests: u64) -> Stats {
        let mut vcpu = VcpuStats {
            asks_khz: Some(1_800_000),
            ..VcpuStats::default()
        };
        vcpu.counts.requests = requests;
        vcpu.accesses.reads_exited = 3 * requests;
        Stats {
            pid: 42,
            at_ns,
            vcpus: vec![vcpu],
            ..Stats::default()
        }
    }

    #[test]
    fn figures_and_rates() {
        let lines = screen(&at(0, 100), &at(500_000_000, 200));
        let text = lines.join("\n");
        assert!(
            text.contains("process 42: 1 vCPUs, 200 requests and 600 exits a second"),
            "{text}"
        );
        assert!(text.contains("1800.0"), "{text}");
        assert!(lines[1].ends_with(" REQ/S  EXITS/S"), "{text}");
        assert!(lines[2].ends_with(" 200      600"), "{text}");
    }

    #[test]
    fn shares_of_the_time_at_each_opp_are_below_the_table() {
        let ran = |at_ns, slow, fast| {
            let mut stats = at(at_ns, 0);
            let times = [(600_000, slow), (1_800_000, fast)];
            stats.vcpus[0].requested = times.map(|(khz, us)| OppTime { khz, us }).into();
            stats
        };
        let lines = screen(&ran(0, 700, 100), &ran(500_000_000, 701, 103));
        let last = "requests of vCPU 0: 600.0 MHz 25.0 %, 1800.0 MHz 75.0 %";
        assert_eq!(lines.last().map(String::as_str), Some(last));
    }

    #[test]
    fn no_time_is_no_division_by_zero() {
        assert_eq!(
            rate(&at(5, 1), &at(5, 1), |stats| stats.vcpus.len() as u64),
            0
        );
    }
}
