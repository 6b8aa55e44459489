//! Figures from rounds in which every contender has its turn: medians, and their text form.

use fastrand::Rng;

/// One figure with its spread over the rounds.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub most: f64,
}

impl Spread {
    /// The spread of at least one value.
    pub fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            0 if middle > 0 => (values[middle - 1] + values[middle]) / 2.0,
            _ => values.get(middle).copied().unwrap_or(f64::NAN),
        };
        let edge = |value: Option<&f64>| value.copied().unwrap_or(f64::NAN);
        Spread { median, least: edge(values.first()), most: edge(values.last()) }
    }
}

/// Formatted as percentages.
impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:5.1} % [{:5.1} .. {:5.1}]", self.median * 100.0, self.least * 100.0, self.most * 100.0)
    }
}

/// Gives each contender its turn in each round, in a new order each time. Calls `begin` before a round, and `turn` with
/// the contender and the round; rounds are counted from 1. Returns a list for each round, in the order of contenders.
///
/// # Errors
/// The first error of `begin` or `turn`.
pub async fn interleaved<T>(
    rounds: u32,
    contenders: usize,
    mut begin: impl FnMut(u32) -> anyhow::Result<()>,
    mut turn: impl AsyncFnMut(usize, u32) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<Vec<T>>> {
    let mut rng = Rng::with_seed(0);
    let mut measured = Vec::new();
    for round in 1..=rounds {
        begin(round)?;
        let mut turns: Vec<Option<T>> = (0..contenders).map(|_| None).collect();
        for next in shuffled(contenders, &mut rng) {
            turns[next] = Some(turn(next, round).await?);
        }
        measured.push(turns.into_iter().flatten().collect());
    }
    Ok(measured)
}

/// The numbers below `count` in a new order each time, so that no contender always follows the same other.
pub fn shuffled(count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    rng.shuffle(&mut order);
    order
}

/// A number with about three digits; all digits before the point are kept.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !size.is_finite() => "none".to_owned(),
        0.0 => "0".to_owned(),
        _ if size >= 999.5 => grouped(value),
        _ if size >= 99.95 => format!("{value:.0}"),
        _ if size >= 9.995 => format!("{value:.1}"),
        _ if size >= 0.9995 => format!("{value:.2}"),
        _ if size >= 1e-4 => {
            let digits = 2 - size.log10().floor() as i32;
            format!("{value:.*}", digits.max(0) as usize)
        }
        _ => format!("{value:.2e}"),
    }
}

/// A whole number with a comma before every three digits.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = if value < 0.0 { "-".to_owned() } else { String::new() };
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_or_all_before_the_point() {
        for (value, text) in [
            (0.0, "0"),
            (5.97, "5.97"),
            (0.17, "0.170"),
            (0.00123, "0.00123"),
            (12.34, "12.3"),
            (99.96, "100"),
            (999.4, "999"),
            (1234.5, "1,234"),
            (-12_345_678.0, "-12,345,678"),
            (1.5e-7, "1.50e-7"),
            (f64::NAN, "none"),
            (f64::INFINITY, "none"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
