package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"aether/e2e/rig"
)

// Concurrency of the loads.
const (
	satConns    = 32
	h2Conns     = 8
	h2Streams   = 8
	closeConns  = 16
	rateConns   = 16
	rateQPS     = 2000
	h2PerSecond = 15_000 // requests of multiplexed, a second that saturation is given
)

// saturation: as many requests as go over 32 kept connections.
func saturation(path string) func(context.Context, *suite, *site) (sample, error) {
	return func(ctx context.Context, z *suite, s *site) (sample, error) { return s.saturate(ctx, z, path) }
}

func (s *site) saturate(ctx context.Context, z *suite, path string) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (sample, error) {
		if err := s.warm(ctx); err != nil {
			return nil, err
		}
		got := sample{}
		var w wrkResult
		err := p.cost(got, "us/req", func() (n float64, err error) {
			w, err = s.wrk(ctx, satConns, z.sat, false, path)
			return w.requests / 1e6, err
		})
		if err != nil {
			return nil, err
		}
		got["req/s"], got["p99-ms"] = w.perSecond, w.p99
		return got, p.memory(got)
	})
}

// multiplexed: a client of HTTP/2 in clear text, 8 connections of 8 streams.
func multiplexed(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (sample, error) {
		// With --connect-to the name in the URL is the authority, whatever is dialled.
		args := []string{"h2load", "--connect-to", s.target(8080).String(), "-T10", "-N10",
			"-c" + strconv.Itoa(h2Conns), "-m" + strconv.Itoa(h2Streams)}
		run := func(n int) (h2loadResult, error) {
			out, err := output(s.A.Command(ctx, append(slices.Clone(args), "-n"+strconv.Itoa(n), "http://"+serviceHost+"/")...))
			if err != nil {
				return h2loadResult{}, err
			}
			return parseH2load(string(out), n)
		}
		if _, err := run(h2Conns * h2Streams * 10); err != nil {
			return nil, err
		}
		got := sample{}
		err := p.cost(got, "us/req", func() (float64, error) {
			r, err := run(z.sat * h2PerSecond)
			got["req/s"] = r.perSecond
			return float64(z.sat*h2PerSecond) / 1e6, err
		})
		return got, err
	})
}

// fixedRate: 2,000 requests a second over 16 connections, whatever the answers do.
func fixedRate(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.paced(ctx, z, rateQPS)
}

// highRate is fixedRate at four fifths of what Envoy can carry on this machine: where a queue shows.
func highRate(ctx context.Context, z *suite, s *site) (sample, error) {
	if z.highQPS == 0 {
		r := z.row("bench=saturation", "envoy")
		if r == nil { // this phase runs alone
			i := slices.IndexFunc(z.sites, func(s *site) bool { return s.name == "envoy" })
			if i < 0 {
				return nil, errors.New("the rate is four fifths of Envoy's at saturation: -variants must have envoy")
			}
			got, err := z.sites[i].saturate(ctx, z, "/")
			if err != nil {
				return nil, fmt.Errorf("saturation of envoy: %w", err)
			}
			r = &row{samples: []sample{got}}
		}
		z.highQPS = int(r.median("req/s") * 4 / 5)
	}
	return s.paced(ctx, z, z.highQPS)
}

func (s *site) paced(ctx context.Context, z *suite, qps int) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (sample, error) {
		if err := s.warm(ctx); err != nil {
			return nil, err
		}
		got := sample{}
		var r struct {
			Requests float64 `json:"requests"`
			QPS      float64 `json:"qps"`
			P50      float64 `json:"p50_ms"`
			P90      float64 `json:"p90_ms"`
			P99      float64 `json:"p99_ms"`
			LagP99   float64 `json:"lag_p99_ms"`
		}
		err := p.cost(got, "us/req", func() (float64, error) {
			err := s.load(ctx, &r, "rate", "-addr", s.target(8080).String(), "-host", serviceHost,
				"-qps", strconv.Itoa(qps), "-conns", strconv.Itoa(rateConns), "-duration", z.rate.String())
			return r.Requests / 1e6, err
		})
		got["p50-ms"], got["p90-ms"], got["p99-ms"], got["lag-p99-ms"], got["req/s"] = r.P50, r.P90, r.P99, r.LagP99, r.QPS
		return got, err
	})
}

// twoPods: two pods of the source's node at once, 16 kept connections each, so that more
// than one loop has something to do.
func twoPods(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (sample, error) {
		both := func(seconds int) (sum wrkResult, err error) {
			var got [2]wrkResult
			var errs [2]error
			var wg sync.WaitGroup
			for i, pod := range []*rig.Pod{s.A, s.C} {
				wg.Go(func() { got[i], errs[i] = s.wrkIn(ctx, pod, satConns/2, seconds, false, "/") })
			}
			wg.Wait()
			return wrkResult{requests: got[0].requests + got[1].requests, perSecond: got[0].perSecond + got[1].perSecond}, errors.Join(errs[:]...)
		}
		if _, err := both(1); err != nil {
			return nil, err
		}
		got := sample{}
		err := p.cost(got, "us/req", func() (float64, error) {
			w, err := both(z.sat)
			got["req/s"] = w.perSecond
			return w.requests / 1e6, err
		})
		return got, err
	})
}

// closeEach: a connection for every request, 16 at a time.
func closeEach(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (sample, error) {
		if err := s.warm(ctx); err != nil {
			return nil, err
		}
		got := sample{}
		var w wrkResult
		err := p.cost(got, "us/req", func() (_ float64, err error) {
			w, err = s.wrk(ctx, closeConns, z.close, true, "/")
			return w.requests / 1e6, err
		})
		got["req/s"] = w.perSecond
		return got, err
	})
}

// rawTCP moves bytes through the declared raw-TCP port: how is load's command, download (from destination to source) or upload.
func rawTCP(how string, streams int) func(context.Context, *suite, *site) (sample, error) {
	return func(ctx context.Context, z *suite, s *site) (sample, error) {
		return s.with(ctx, workTCP, func(p pair) (sample, error) {
			return s.transfer(ctx, p, z.bytes, how, s.target(9000), streams)
		})
	}
}

// passthrough moves bytes from a server outside the mesh: there is no destination's proxy.
func passthrough(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.with(ctx, workTCP, func(p pair) (sample, error) {
		p.b = nil
		return s.transfer(ctx, p, z.bytes, "download", netip.AddrPortFrom(s.rig.Nodes[1].IP4, outsidePort), 1)
	})
}

func (s *site) transfer(ctx context.Context, p pair, n int64, how string, to netip.AddrPort, streams int) (sample, error) {
	got := sample{}
	var d struct {
		Bytes   float64 `json:"bytes"`
		Seconds float64 `json:"seconds"`
	}
	err := p.cost(got, "s/GB", func() (float64, error) {
		err := s.load(ctx, &d, how, "-addr", to.String(), "-bytes", strconv.FormatInt(n, 10), "-streams", strconv.Itoa(streams))
		return d.Bytes / 1e9, err
	})
	if err == nil {
		got["Gbit/s"] = d.Bytes * 8 / 1e9 / d.Seconds
	}
	return got, err
}

// idleConns: what 10,000 captured connections, each idle after one request, cost the source's proxy.
func idleConns(ctx context.Context, z *suite, s *site) (sample, error) {
	return s.with(ctx, workHTTP, func(p pair) (_ sample, err error) {
		before, err := settled(ctx, p.a)
		if err != nil {
			return nil, err
		}
		cmd := s.A.Command(ctx, filepath.Join(s.suite.tools, "load"), "idle", "-addr", s.target(8080).String(), "-host", serviceHost, "-n", strconv.Itoa(z.idle))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		hold, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		said, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		line, err := bufio.NewReader(said).ReadString('\n')
		var after, anon int64
		if err == nil {
			after, err = settled(ctx, p.a)
		}
		if err == nil {
			anon, err = p.a.Anonymous()
		}
		hold.Close() // it checks that every connection is still there, and ends
		io.Copy(io.Discard, said)
		if e := cmd.Wait(); e != nil {
			return nil, fmt.Errorf("load idle: %w: %s", e, stderr.Bytes())
		}
		if err != nil {
			return nil, fmt.Errorf("load idle: said %q: %w", line, err)
		}
		return sample{
			"A-B/conn":   float64(after-before) / float64(z.idle),
			"A-MB-empty": float64(before) / 1e6,
			"A-MB-idle":  float64(after) / 1e6,
			"A-MB-anon":  float64(anon) / 1e6,
		}, nil
	})
}

// serverFirst: the first byte of a server outside the mesh whose client waits for it.
func serverFirst(ctx context.Context, _ *suite, s *site) (sample, error) {
	return s.with(ctx, workHTTP, func(pair) (sample, error) {
		var f struct {
			MS float64 `json:"first_byte_ms"`
		}
		to := netip.AddrPortFrom(s.rig.Nodes[1].IP4, bannerPort)
		err := s.load(ctx, &f, "first", "-addr", to.String())
		return sample{"first-byte-ms": f.MS}, err
	})
}

// warm opens pools and buffers.
func (s *site) warm(ctx context.Context) error {
	_, err := s.wrk(ctx, satConns, 1, false, "/")
	return err
}

// cost runs f, which returns units of work, and notes what each proxy spent a unit
// in seconds, as "A-<unit>" and "B-<unit>".
func (p pair) cost(into sample, unit string, f func() (float64, error)) error {
	procs := map[string]*rig.Proc{}
	for name, proc := range map[string]*rig.Proc{"A-" + unit: p.a, "B-" + unit: p.b} {
		if proc != nil {
			procs[name] = proc
		}
	}
	before := map[string]time.Duration{}
	for name, proc := range procs {
		var err error
		if before[name], err = proc.CPU(); err != nil {
			return err
		}
	}
	units, err := f()
	if err != nil {
		return err
	}
	for name, proc := range procs {
		after, err := proc.CPU()
		if err != nil {
			return err
		}
		into[name] = (after - before[name]).Seconds() / units
	}
	return nil
}

// memory notes the resident memory of both proxies, in MB.
func (p pair) memory(into sample) error {
	if p.a == nil {
		return nil
	}
	for name, proc := range map[string]*rig.Proc{"A-MB": p.a, "B-MB": p.b} {
		rss, err := proc.RSS()
		if err != nil {
			return err
		}
		into[name] = float64(rss) / 1e6
	}
	return nil
}

// settled is the resident memory once it has not moved by 1 % for a second, or after six seconds.
func settled(ctx context.Context, p *rig.Proc) (int64, error) {
	const step, calm, most = 250 * time.Millisecond, 4, 24
	tick := time.NewTicker(step)
	defer tick.Stop()
	last, err := p.RSS()
	same := 0
	for i := 0; err == nil && same < calm && i < most; i++ {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
		}
		var rss int64
		rss, err = p.RSS()
		if d := rss - last; d > last/100 || d < -last/100 {
			last, same = rss, 0
		} else {
			same++
		}
	}
	if err != nil {
		return 0, err
	}
	return p.RSS()
}

// load runs the load command in the source's pod and decodes what it prints; into may be nil.
func (s *site) load(ctx context.Context, into any, args ...string) error {
	cmd := s.A.Command(ctx, append([]string{filepath.Join(s.suite.tools, "load")}, args...)...)
	stdout, err := output(cmd)
	if err != nil || into == nil {
		return err
	}
	if err := json.Unmarshal(stdout, into); err != nil {
		return fmt.Errorf("load %s: %w: %q", args[0], err, stdout)
	}
	return nil
}

// output runs a command; the error carries what it said.
func output(cmd *exec.Cmd) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%v: %w: %s%s", cmd.Args, err, stderr.Bytes(), stdout.Bytes())
	}
	return stdout.Bytes(), nil
}

// wrkResult is what wrk(1) printed.
type wrkResult struct {
	requests, perSecond float64
	p50, p99            float64 // ms
}

// wrk runs wrk in the source's pod.
func (s *site) wrk(ctx context.Context, conns, seconds int, closing bool, path string) (wrkResult, error) {
	return s.wrkIn(ctx, s.A, conns, seconds, closing, path)
}

func (s *site) wrkIn(ctx context.Context, pod *rig.Pod, conns, seconds int, closing bool, path string) (wrkResult, error) {
	args := []string{"wrk", "-t1", "-c" + strconv.Itoa(conns), "-d" + strconv.Itoa(seconds) + "s", "--latency", "-H", "Host: " + serviceHost}
	if closing {
		args = append(args, "-H", "Connection: close")
	}
	out, err := output(pod.Command(ctx, append(args, "http://"+s.target(8080).String()+path)...))
	if err != nil {
		return wrkResult{}, err
	}
	return parseWrk(string(out))
}

var (
	wrkTotal  = regexp.MustCompile(`(?m)^\s*(\d+) requests in `)
	wrkRate   = regexp.MustCompile(`(?m)^Requests/sec:\s+([\d.]+)$`)
	wrkFailed = regexp.MustCompile(`(?m)^\s*(Socket errors: .*|Non-2xx or 3xx responses: .*)$`)
	wrkP50    = regexp.MustCompile(`(?m)^\s+50%\s+(\S+)$`)
	wrkP99    = regexp.MustCompile(`(?m)^\s+99%\s+(\S+)$`)
)

// parseWrk reads wrk's summary; errors that wrk counted are an error.
func parseWrk(text string) (w wrkResult, err error) {
	if m := wrkFailed.FindString(text); m != "" {
		return w, fmt.Errorf("wrk had errors: %s", m)
	}
	number := func(re *regexp.Regexp) float64 {
		m := re.FindStringSubmatch(text)
		if m == nil {
			err = fmt.Errorf("wrk's output has no %s:\n%s", re, text)
			return 0
		}
		if f, e := strconv.ParseFloat(m[1], 64); e == nil {
			return f
		}
		d, e := time.ParseDuration(m[1]) // "1.02ms", "93.00us"
		if e != nil {
			err = fmt.Errorf("wrk's output: %w", e)
		}
		return d.Seconds() * 1e3
	}
	w = wrkResult{requests: number(wrkTotal), perSecond: number(wrkRate), p50: number(wrkP50), p99: number(wrkP99)}
	if err == nil && w.requests == 0 {
		err = fmt.Errorf("wrk made no request:\n%s", text)
	}
	return w, err
}

// h2loadResult is what h2load(1) printed.
type h2loadResult struct{ perSecond float64 }

var (
	h2loadCounts = regexp.MustCompile(`(?m)^requests: (\d+) total, \d+ started, \d+ done, (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout\nstatus codes: (\d+) 2xx`)
	h2loadRate   = regexp.MustCompile(`(?m)^finished in [^,]+, ([\d.]+) req/s`)
)

// parseH2load reads h2load's summary; anything but n answers of 2xx is an error.
func parseH2load(text string, n int) (h2loadResult, error) {
	m, r, want := h2loadCounts.FindStringSubmatch(text), h2loadRate.FindStringSubmatch(text), strconv.Itoa(n)
	if m == nil || r == nil || m[1] != want || m[2] != want || m[3] != "0" || m[4] != "0" || m[5] != "0" || m[6] != want {
		return h2loadResult{}, fmt.Errorf("h2load did not get %d good answers:\n%s", n, text)
	}
	f, err := strconv.ParseFloat(r[1], 64)
	return h2loadResult{f}, err
}
