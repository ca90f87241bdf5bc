package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Churn is what churn measured; latencies are as those of Rate, the connect among them.
type Churn struct {
	Requests int     `json:"requests"`
	P50      float64 `json:"p50_ms"`
	P99      float64 `json:"p99_ms"`
	Max      float64 `json:"max_ms"`
}

// churn makes a connection for every request, at a fixed rate: request i is due i/qps after
// the start. No more than most are under way at once: what is due beyond waits, and
// that counts. The request must ask for the end of the connection.
func churn(to netip.AddrPort, request []byte, qps, most int, length time.Duration) (*Churn, error) {
	total := int(float64(qps) * length.Seconds())
	latency := make([]int64, total)
	errs := make(chan error, most)
	var next atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for range most {
		all.Go(func() {
			for {
				i := int(next.Add(1) - 1)
				if i >= total {
					return
				}
				due := start.Add(time.Duration(i) * time.Second / time.Duration(qps))
				<-time.After(time.Until(due)) // at once when it is past
				if err := once(to, request); err != nil {
					errs <- fmt.Errorf("connection %d: %w", i+1, err)
					next.Store(int64(total)) // all end
					return
				}
				latency[i] = int64(time.Since(due))
			}
		})
	}
	all.Wait()
	select {
	case err := <-errs:
		return nil, err
	default:
	}
	slices.Sort(latency)
	return &Churn{Requests: total, P50: at(latency, 50), P99: at(latency, 99), Max: at(latency, 100)}, nil
}

// once connects, asks, and reads a whole answer up to the connection's end.
func once(to netip.AddrPort, request []byte) error {
	c, err := net.DialTimeout("tcp", to.String(), dialTimeout)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(ioTimeout))
	if _, err := c.Write(request); err != nil {
		return err
	}
	const most = 64 << 10
	b, err := io.ReadAll(io.LimitReader(c, most))
	if err != nil {
		return err
	}
	n, err := answer(b)
	if err == nil && (n == 0 || n != len(b)) {
		err = fmt.Errorf("%d bytes before the end, and a whole answer is %d", len(b), n)
	}
	return err
}
