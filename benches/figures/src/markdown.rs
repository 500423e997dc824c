// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts of a Markdown table.

/// A row of a table.
pub fn row(cells: impl IntoIterator<Item = String>) -> String {
    let cells: Vec<String> = cells.into_iter().collect();
    format!("| {} |\n", cells.join(" | "))
}

/// The head of a table: names, and the line below them.
pub fn head(names: &[&str]) -> String {
    let names = names.iter().map(|name| (*name).to_owned());
    format!("{}|{}\n", row(names.clone()), "---|".repeat(names.len()))
}
