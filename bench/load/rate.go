package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Rate is what paced measured. Latencies are counted from the moment a request was
// due, not from when it was sent: a stall of the server, or a queue in front of
// the connections, is part of every request that it delayed.
type Rate struct {
	Requests int     `json:"requests"`
	QPS      float64 `json:"qps"` // reached
	P50      float64 `json:"p50_ms"`
	P90      float64 `json:"p90_ms"`
	P99      float64 `json:"p99_ms"`
	Max      float64 `json:"max_ms"`
	LagP99   float64 `json:"lag_p99_ms"` // due to sent: the generator's own lateness, and queueing
	CPU      float64 `json:"cpu_s"`      // the generator's own
}

// drain is how long after the last request is due its answer may come.
const drain = 5 * time.Second

// paced sends requests at a fixed rate whether or not the former have been answered:
// request i is due i/qps after the start and goes out on the connection that
// has been idle longest, or waits, in order, for one. One thread does it all: a timer
// descriptor and the connections in one epoll set, so that a wake-up is as exact as
// the kernel's timers and nothing but the kernel schedules it.
func paced(to netip.AddrPort, request []byte, qps, conns int, length time.Duration) (*Rate, error) {
	runtime.LockOSThread() // with the timer slack below, until the process ends
	// Without this the kernel may wake us 50 µs late to save power.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("timer slack: %w", err)
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	defer unix.Close(ep)
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("timer: %w", err)
	}
	defer unix.Close(timer)

	type conn struct {
		fd   int
		due  int64 // of the request on its way
		have int   // bytes of the answer in buf
		buf  [4096]byte
	}
	cs := make([]conn, conns)
	for i := range cs {
		f, err := connect(to)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		cs[i].fd = int(f.Fd())
		if err := unix.SetNonblock(cs[i].fd, true); err != nil {
			return nil, fmt.Errorf("connection: %w", err)
		}
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, cs[i].fd, &ev); err != nil {
			return nil, fmt.Errorf("epoll: %w", err)
		}
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: -1}
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, timer, &ev); err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}

	total := int(float64(qps) * length.Seconds())
	latency, lag := make([]int64, 0, total), make([]int64, 0, total)
	idle := make([]int, conns) // ring: longest idle first
	for i := range idle {
		idle[i] = i
	}
	first, free := 0, conns
	sent := 0
	start := now() + int64(time.Millisecond)
	due := func(i int) int64 { return start + int64(i)*int64(time.Second)/int64(qps) }
	limit := due(total) + int64(drain)
	armed := int64(0)

	events := make([]unix.EpollEvent, 64)
	for len(latency) < total {
		t := now()
		if t > limit {
			return nil, fmt.Errorf("%d of %d requests unanswered %s after the last was due", total-len(latency), total, drain)
		}
		for sent < total && free > 0 && due(sent) <= t {
			c := &cs[idle[first]]
			first, free = (first+1)%conns, free-1
			c.due = due(sent)
			sent++
			if n, err := unix.Write(c.fd, request); err != nil || n != len(request) {
				return nil, fmt.Errorf("request %d: wrote %d bytes: %w", sent, n, err)
			}
			t = now()
			lag = append(lag, t-c.due)
		}
		// Wake for the next one that is due, if a connection is there for it; else for the limit.
		next := limit
		if sent < total && free > 0 {
			next = due(sent)
		}
		if next != armed {
			spec := unix.ItimerSpec{Value: unix.NsecToTimespec(next)}
			if err := unix.TimerfdSettime(timer, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
				return nil, fmt.Errorf("timer: %w", err)
			}
			armed = next
		}
		n, err := unix.EpollWait(ep, events, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("epoll: %w", err)
		}
		for _, e := range events[:n] {
			if e.Fd < 0 {
				armed = 0 // it fired; arming it anew also clears it
				continue
			}
			c := &cs[e.Fd]
			k, err := unix.Read(c.fd, c.buf[c.have:])
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || k == 0 {
				return nil, fmt.Errorf("connection closed by the server after %d answers (%v)", len(latency), err)
			}
			c.have += k
			size, err := answer(c.buf[:c.have])
			switch {
			case err != nil:
				return nil, err
			case size == 0 && c.have == len(c.buf):
				return nil, fmt.Errorf("answer does not fit %d bytes", len(c.buf))
			case size == 0:
				continue
			case size != c.have:
				return nil, fmt.Errorf("answer of %d bytes is followed by %d more", size, c.have-size)
			case c.due == 0:
				return nil, errors.New("answer without a request")
			}
			latency = append(latency, now()-c.due)
			c.have, c.due = 0, 0
			idle[(first+free)%conns] = int(e.Fd)
			free++
		}
	}
	took := now() - start
	slices.Sort(latency)
	slices.Sort(lag)
	var cpu unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &cpu); err != nil {
		return nil, fmt.Errorf("own processor time: %w", err)
	}
	return &Rate{
		Requests: total, QPS: float64(total) / (float64(took) / 1e9),
		P50: at(latency, 50), P90: at(latency, 90), P99: at(latency, 99), Max: at(latency, 100),
		LagP99: at(lag, 99), CPU: float64(cpu.Nano()) / 1e9,
	}, nil
}

// now is the monotonic clock in nanoseconds, the one that the timer goes by.
func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("load: no monotonic clock: " + err.Error())
	}
	return ts.Nano()
}

// at is the p-th percentile, nearest rank, of sorted nanoseconds, in milliseconds.
func at(sorted []int64, p int) float64 {
	rank := (len(sorted)*p + 99) / 100
	return float64(sorted[max(rank, 1)-1]) / 1e6
}

// answer reports the size of the HTTP/1.1 response at the start of b, 0 while it
// is not complete. Anything but a 200 with a Content-Length is an error.
func answer(b []byte) (int, error) {
	head := bytes.Index(b, []byte("\r\n\r\n"))
	if head < 0 {
		return 0, nil
	}
	lines := bytes.Split(b[:head], []byte("\r\n"))
	if !bytes.HasPrefix(lines[0], []byte("HTTP/1.1 200 ")) {
		return 0, fmt.Errorf("answer is not 200: %.300q", b)
	}
	for _, l := range lines[1:] {
		name, value, _ := bytes.Cut(l, []byte(":"))
		if !bytes.EqualFold(name, []byte("content-length")) {
			continue
		}
		n, err := strconv.Atoi(string(bytes.TrimSpace(value)))
		if err != nil || n < 0 {
			return 0, fmt.Errorf("content-length %q", value)
		}
		if size := head + 4 + n; size <= len(b) {
			return size, nil
		}
		return 0, nil
	}
	return 0, fmt.Errorf("answer without content-length: %.300q", b)
}

// connect dials and hands over the descriptor, outside Go's poller. No delay
// is set by the dialler.
func connect(to netip.AddrPort) (*os.File, error) {
	c, err := net.DialTimeout("tcp", to.String(), 5*time.Second)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.(*net.TCPConn).File()
}
