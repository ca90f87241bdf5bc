package telemetry

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"

	"aether/dataplane/journal"
	"aether/dataplane/model"
)

// maxSeries bounds the combinations of labels that are told apart, all loops together.
const maxSeries = 16384

// overflow stands for the names of what is not told apart any more.
const overflow = "overflow"

// unknown is the service of contract 14.1 where there is none.
const unknown = "unknown"

// key is all that an entry is counted under; the families below each look at a part.
// Nothing in it is a peer's to choose: no Host, path or method, and of addresses only
// the port that the pod itself serves.
type key struct {
	dir     model.Direction
	request bool
	status  uint16
	port    uint16 // inbound: the port of the pod
	flags   journal.Flags

	action, reason, ended, cause string // closed sets

	workload string // the pod's ServiceAccount
	pod      string // its name, if that is wanted
	far      string // the backend that was chosen: "shop/cart:8080"; inbound the caller's verified SPIFFE ID
}

// place is where in shard.near the key's cell may stand.
func (k *key) place() uint {
	far, near := uintptr(unsafe.Pointer(unsafe.StringData(k.far))), uintptr(unsafe.Pointer(unsafe.StringData(k.workload)))
	return uint(far>>3^far>>9^near>>4^uintptr(k.dir)^uintptr(k.status)) % uint(len(shard{}.near))
}

// cell is one key's count on one loop.
type cell struct {
	key key
	n   atomic.Uint64
}

// shard is what one loop counts in. Only that loop reads and writes seen, so it needs
// no lock; a scrape reads the numbers, and finds the cells in counts.cells.
type shard struct {
	seen map[key]*cell
	near [64]*cell // of seen, those counted last by where their names lie: to compare a key is cheaper than to hash it
	sums [4][2]sum // by direction, and request or connection
}

type sum struct {
	in, out, nanos atomic.Uint64
	took           [len(durations) + 1]atomic.Uint64
}

// durations are the bounds of aether_duration_seconds.
var durations = [...]time.Duration{
	500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond,
	5 * time.Second, 10 * time.Second, time.Minute, 5 * time.Minute,
}

// counts are the counters that entries feed.
type counts struct {
	pods   atomic.Pointer[named]
	shards atomic.Pointer[[]*shard] // by journal.Entry.Loop

	off sync.Mutex // for shard 0: of entries that goroutines tell

	mu    sync.Mutex
	cells []*cell // guarded by mu; grows only
}

// Ended is journal.Observer.
func (m *Metrics) Ended(e *journal.Entry) { m.counts.ended(e) }

func (c *counts) ended(e *journal.Entry) {
	s := c.shard(e.Loop)
	if e.Loop <= 0 {
		c.off.Lock()
		defer c.off.Unlock()
	}
	k := key{dir: e.Dir, request: e.Request, flags: e.Flags, action: e.Action, reason: e.Reason, ended: e.Ended, cause: e.Cause}
	kind := 0
	if e.Request {
		kind = 1
		k.status = uint16(min(max(e.Status, 0), 999))
		k.workload = e.Workload
		k.far = e.Backend
		if e.Dir == model.Inbound {
			k.far, k.port = e.Peer, e.Dst.Port()
		}
		if c.pods.Load().has(e.Namespace) {
			k.pod = e.Pod
		}
	}
	near := &s.near[k.place()]
	l := *near
	if l == nil || l.key != k {
		if l = s.seen[k]; l == nil {
			l = c.add(s, k)
		}
		*near = l
	}
	l.n.Add(1)
	t := &s.sums[e.Dir&3][kind]
	if e.BytesIn > 0 {
		t.in.Add(uint64(e.BytesIn))
	}
	if e.BytesOut > 0 {
		t.out.Add(uint64(e.BytesOut))
	}
	took := max(e.Took, 0)
	t.nanos.Add(uint64(took))
	i := 0
	for i < len(durations) && took > durations[i] {
		i++
	}
	t.took[i].Add(1)
}

func (c *counts) shard(loop int) *shard {
	loop = max(loop, 0)
	if p := c.shards.Load(); p != nil && loop < len(*p) {
		return (*p)[loop]
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*shard
	if p := c.shards.Load(); p != nil {
		all = *p
	}
	if loop < len(all) {
		return all[loop]
	}
	all = append([]*shard(nil), all...)
	for len(all) <= loop {
		all = append(all, &shard{seen: map[key]*cell{}})
	}
	c.shards.Store(&all)
	return all[loop]
}

// add makes the cell of k; of what is too much, one that stands for many.
func (c *counts) add(s *shard, k key) *cell {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.cells) >= maxSeries {
		k.status -= k.status % 100
		k.workload, k.far, k.port = overflow, overflow, 0
		if k.pod != "" {
			k.pod = overflow
		}
		if l := s.seen[k]; l != nil {
			return l
		}
	}
	l := &cell{key: k}
	s.seen[k] = l
	c.cells = append(c.cells, l)
	return l
}

// services are the labels of contract 14.1 that say who called whom.
type services struct {
	reporter, source, sourcePod, destination, destinationPod, port string
}

// services names them as each reporter spells them: the source has the callee as
// name.namespace, everything else is a bare ServiceAccount.
func (k *key) services() services {
	s := services{source: unknown, destination: unknown}
	if k.dir == model.Inbound {
		s.reporter, s.destination, s.destinationPod = "destination", k.workload, k.pod
		if k.far == overflow {
			s.source = overflow
		} else if _, sa, ok := strings.Cut(k.far, "/sa/"); ok && sa != "" && !strings.Contains(sa, "/") {
			s.source = sa
		}
		if k.port != 0 {
			s.port = strconv.Itoa(int(k.port))
		}
		return s
	}
	s.reporter, s.source, s.sourcePod = "source", k.workload, k.pod
	if k.far == overflow {
		s.destination = overflow
		return s
	}
	name, port, _ := strings.Cut(k.far, ":")
	if ns, svc, ok := strings.Cut(name, "/"); ok {
		s.destination, s.port = svc+"."+ns, port
	}
	return s
}

// probe: the paths of contract 4.11 are answered before anything is counted.
func (k *key) probe() bool { return k.reason == "readyz" || k.reason == "live" || k.reason == "ready" }

var (
	descRequests = prometheus.NewDesc("aether_requests_total",
		"Requests by who called whom, how they were answered and Envoy's response flags.",
		[]string{"reporter", "source_service", "source_pod", "destination_service", "destination_pod", "port", "response_code", "response_flags"}, nil)
	descEnds = prometheus.NewDesc("aether_ends_total",
		"Requests, and connections that carried none, by how they were decided and how they ended.",
		[]string{"direction", "kind", "action", "reason", "code", "ended"}, nil)
	descFailures = prometheus.NewDesc("aether_failures_total",
		"Requests and connections that something went wrong with, by what: no-certificate, connect, wrong-peer, ...",
		[]string{"direction", "kind", "cause"}, nil)
	descBytes = prometheus.NewDesc("aether_bytes_total",
		"Payload bytes of requests and connections; flow says from (in) or to (out) the client.",
		[]string{"direction", "kind", "flow"}, nil)
	descDuration = prometheus.NewDesc("aether_duration_seconds",
		"From the head of a request, or the accept of a connection, to its end.",
		[]string{"direction", "kind"}, nil)
	descSeries = prometheus.NewDesc("aether_series",
		"Combinations of labels that are told apart; at 16384 further ones are counted as overflow.", nil, nil)
)

var kinds = [2]string{"connection", "request"}

// Describe is prometheus.Collector.
func (c *counts) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRequests, descEnds, descFailures, descBytes, descDuration, descSeries} {
		ch <- d
	}
}

// Collect is prometheus.Collector.
func (c *counts) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	cells := c.cells // what is appended meanwhile is the next scrape's
	c.mu.Unlock()
	type request struct {
		services
		status uint16
		flags  journal.Flags
	}
	type end struct {
		dir                         model.Direction
		request                     bool
		action, reason, code, ended string
	}
	type failure struct {
		dir     model.Direction
		request bool
		cause   string
	}
	requests, ends, failures := map[request]uint64{}, map[end]uint64{}, map[failure]uint64{}
	for _, l := range cells {
		n, k := l.n.Load(), &l.key
		e := end{k.dir, k.request, k.action, k.reason, "", k.ended}
		if k.request {
			e.code = class(k.status)
			if !k.probe() {
				requests[request{k.services(), k.status, k.flags}] += n
			}
		}
		ends[e] += n
		if k.cause != "" {
			failures[failure{k.dir, k.request, k.cause}] += n
		}
	}
	kind := func(request bool) string {
		if request {
			return kinds[1]
		}
		return kinds[0]
	}
	counter := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	for k, n := range requests {
		counter(descRequests, n, k.reporter, k.source, k.sourcePod, k.destination, k.destinationPod, k.port, strconv.Itoa(int(k.status)), k.flags.String())
	}
	for k, n := range ends {
		counter(descEnds, n, k.dir.String(), kind(k.request), k.action, k.reason, k.code, k.ended)
	}
	for k, n := range failures {
		counter(descFailures, n, k.dir.String(), kind(k.request), k.cause)
	}
	ch <- prometheus.MustNewConstMetric(descSeries, prometheus.GaugeValue, float64(len(cells)))
	c.collectSums(ch)
}

// collectSums adds up what the loops measured.
func (c *counts) collectSums(ch chan<- prometheus.Metric) {
	p := c.shards.Load()
	if p == nil {
		return
	}
	for dir := model.Captured; dir <= model.Inbound; dir++ {
		for kind, name := range kinds {
			var in, out, nanos, n uint64
			took := make([]uint64, len(durations)+1)
			for _, s := range *p {
				t := &s.sums[dir][kind]
				in, out, nanos = in+t.in.Load(), out+t.out.Load(), nanos+t.nanos.Load()
				for i := range took {
					took[i] += t.took[i].Load()
				}
			}
			for _, t := range took {
				n += t
			}
			if n == 0 {
				continue
			}
			ch <- prometheus.MustNewConstMetric(descBytes, prometheus.CounterValue, float64(in), dir.String(), name, "in")
			ch <- prometheus.MustNewConstMetric(descBytes, prometheus.CounterValue, float64(out), dir.String(), name, "out")
			send(ch, descDuration, durations[:], took, time.Duration(nanos), dir.String(), name)
		}
	}
}
