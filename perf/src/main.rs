//! Benchmarks, one per claim.

mod guards;

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("guards") => print!("{}", guards::run()?),
        _ => anyhow::bail!("name a benchmark: guards"),
    }
    Ok(())
}
