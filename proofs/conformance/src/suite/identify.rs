//! Discovery, and what the target says of itself, as nvme-cli asks for it.

use anyhow::Result;

use crate::bench::Bench;

pub fn run(bench: &mut Bench<'_>) -> Result<()> {
    bench.sealblock.create("small", "64MiB", &["--block-size", "512"])?;
    bench.sealblock.create("large", "64MiB", &[])?;
    let server = bench.sealblock.serve(&["small", "large"], &[])?;
    let said = bench.sh(
        &server,
        r#"
        nvme discover -t tcp -a 10.0.2.2 -s $PORT
        small=$(attach small) large=$(attach large)
        nvme list; nvme list-subsys
        for dev in $small $large; do
          nvme id-ctrl /dev/$dev
          nvme id-ns /dev/$dev
          nvme list-ns /dev/$dev
        done
        "#,
    )?;
    eprintln!("{said}");
    Ok(())
}
