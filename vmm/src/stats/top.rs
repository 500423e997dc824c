// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq top`: the table, alive, with rates.

use std::{
    io::{self, IsTerminal},
    path::Path,
    time::Duration,
};

use anyhow::{Context, bail};
use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event, KeyCode, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Modifier, Style},
    text::Line,
    widgets::{Row, Table},
};

use super::{Stats, VcpuStats, ask, text};

type Count = fn(&VcpuStats) -> u64;

/// The columns behind the table's: title, and what is counted a second.
const RATES: [(&str, Count); 2] = [
    ("REQ/S", |vcpu| vcpu.counts.requests),
    ("EXITS/S", |vcpu| vcpu.accesses.exits()),
];

/// Shows the VMM at `path` until `q`, Ctrl-C or the VMM's end.
///
/// # Errors
/// When there is no terminal, or no VMM any more.
pub fn top(path: &Path, every: Duration) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() {
        bail!("top needs a terminal; use vcpufreq stats for output to files and pipes");
    }
    let first = ask(path)?;
    let mut terminal = ratatui::try_init().context("can't set up the terminal")?;
    let shown = show(&mut terminal, path, every, first);
    ratatui::restore();
    shown
}

fn show(
    terminal: &mut DefaultTerminal,
    path: &Path,
    every: Duration,
    first: Stats,
) -> anyhow::Result<()> {
    let mut before = first.clone();
    let mut now = first;
    loop {
        terminal.draw(|frame| draw(frame, &before, &now))?;
        if event::poll(every)? {
            if is_quit(&event::read()?) {
                return Ok(());
            }
            continue;
        }
        before = now;
        now = ask(path)?;
    }
}

fn is_quit(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers == KeyModifiers::CONTROL;
    ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

fn draw(frame: &mut Frame<'_>, before: &Stats, now: &Stats) {
    let parts = [Constraint::Length(1), Constraint::Fill(1)];
    let [head, body] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Line::raw(headline(before, now)), head);
    frame.render_widget(table(before, now), body);
}

fn headline(before: &Stats, now: &Stats) -> String {
    let requests = |stats: &Stats| stats.vcpus.iter().map(|v| v.counts.requests).sum();
    let exits = |stats: &Stats| stats.vcpus.iter().map(|v| v.accesses.exits()).sum();
    format!(
        "vcpufreq, process {}: {} vCPUs, {} requests and {} exits a second; q ends",
        now.pid,
        now.vcpus.len(),
        rate(before, now, requests),
        rate(before, now, exits),
    )
}

/// How often something happened a second between two moments.
fn rate(before: &Stats, now: &Stats, count: impl Fn(&Stats) -> u64) -> u64 {
    let happened = u128::from(count(now).saturating_sub(count(before)));
    let ns = u128::from(now.at_ns.saturating_sub(before.at_ns)).max(1);
    u64::try_from(happened * 1_000_000_000 / ns).unwrap_or(u64::MAX)
}

fn table(before: &Stats, now: &Stats) -> Table<'static> {
    let mut titles: Vec<_> = text::COLUMNS.map(|(title, _)| title.to_owned()).into();
    titles.extend(RATES.map(|(title, _)| title.to_owned()));
    let rows = now.vcpus.iter().enumerate().map(|(index, vcpu)| {
        let mut cells: Vec<_> = text::cells(vcpu).into();
        cells.extend(RATES.map(|(_, count)| {
            let of_vcpu = |stats: &Stats| stats.vcpus.get(index).map_or(0, count);
            rate(before, now, of_vcpu).to_string()
        }));
        Row::new(cells)
    });
    let widths = text::COLUMNS.iter().map(|&(_, width)| width);
    let widths = widths.chain(RATES.map(|_| 8)).map(|width| {
        // Wider than any terminal is as wide as the terminal.
        Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX))
    });
    Table::new(rows, widths)
        .header(Row::new(titles).style(Style::new().add_modifier(Modifier::REVERSED)))
        .column_spacing(1)
}

#[cfg(test)]
mod tests {
    //! Promises: what is drawn has the figures and the rates of the time
    //! between two moments.

    use ratatui::{Terminal, backend::TestBackend};

    use super::*;

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
            accesses_outside: 0,
            governors_lost: 0,
            pins_lost: 0,
        }
    }

    #[test]
    fn figures_and_rates() {
        let mut terminal = Terminal::new(TestBackend::new(180, 4)).unwrap();
        let (before, now) = (at(0, 100), at(500_000_000, 200));
        terminal.draw(|frame| draw(frame, &before, &now)).unwrap();
        let text = terminal.backend().to_string();
        assert!(
            text.contains("process 42: 1 vCPUs, 200 requests and 600 exits a second"),
            "{text}"
        );
        assert!(text.contains("1800.0"), "{text}");
        let row = text.lines().nth(2).unwrap();
        let cells: Vec<_> = row.split_whitespace().rev().collect();
        assert!(cells.contains(&"200") && cells.contains(&"600"), "{text}");
    }

    #[test]
    fn no_time_is_no_division_by_zero() {
        assert_eq!(
            rate(&at(5, 1), &at(5, 1), |stats| stats.vcpus.len() as u64),
            0
        );
    }
}
