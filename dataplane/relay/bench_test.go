package relay

import (
	"io"
	"syscall"
	"testing"
)

// BenchmarkBulk downloads through a relay, or through the two of a hop, all in
// this process, and reports its CPU seconds for a gigabyte: both applications' ends
// included, which "direct" shows alone. A proxy of a hop costs half of what "hop"
// is above "direct".
func BenchmarkBulk(b *testing.B) {
	const chunk = 1 << 20
	run := func(b *testing.B, from, to io.ReadWriter) {
		go func() {
			for buf := make([]byte, chunk); ; {
				if _, err := from.Write(buf); err != nil {
					return
				}
			}
		}()
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		before := cpu(b)
		for b.Loop() {
			if _, err := io.ReadFull(to, buf); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric((cpu(b)-before)/(float64(b.N)*chunk/1e9), "cpu-s/GB")
	}
	b.Run("direct", func(b *testing.B) {
		c, s := tcpPair(b)
		run(b, s, c)
	})
	for _, kind := range []string{"plain", "hop std", "hop"} {
		b.Run(kind, func(b *testing.B) {
			bed := newBed(b, kind, nil)
			run(b, bed.server, bed.client)
		})
	}
}

// BenchmarkEcho sends 64 bytes there and back.
func BenchmarkEcho(b *testing.B) {
	for _, kind := range []string{"plain", "hop std", "hop"} {
		b.Run(kind, func(b *testing.B) {
			bed := newBed(b, kind, nil)
			go io.Copy(bed.server, bed.server)
			buf := make([]byte, 64)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bed.client.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(bed.client, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// cpu returns the CPU seconds of this process so far.
func cpu(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
