// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `dynamic-power-coefficient` from measured or stated powers.

use crate::facts::OppTable;

/// The coefficient C in µW/MHz/V² for which `P = C · f · V²` is nearest to the
/// table's powers (least squares over all OPPs, so the fast ones count most).
///
/// Voltage and frequency are cut to whole mV and MHz, as Linux does where it
/// uses C (`dev_pm_opp_calc_power()`). `None` where a voltage or power isn't
/// known, or where C would not be a 32-bit number from 1 on.
pub(crate) fn coefficient(table: &OppTable) -> Option<u32> {
    let mut power_by_x: u128 = 0;
    let mut x_squared: u128 = 0;
    for opp in &table.opps {
        let mv = u128::from(opp.uv? / 1000);
        // f · V² in MHz · V² / 1000: below 2^57, so the sum of 64 squares is
        // below 2^120.
        let x = u128::from(opp.khz / 1000) * mv * mv / 1000;
        power_by_x += u128::from(opp.uw?) * x;
        x_squared += x * x;
    }
    let rounded = (1000 * power_by_x + x_squared / 2).checked_div(x_squared)?;
    u32::try_from(rounded).ok().filter(|&c| c != 0)
}
