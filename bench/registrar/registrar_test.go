// Package registrar measures the registrar with a fleet of watching nodes.
//
//   - Server and nodes are two processes, so that what is measured is the server's.
//   - The nodes speak gRPC over mTLS on the loopback, each over a connection of its
//     own, and decode only what they must: they are not what is measured.
//   - The rows come from a store that keeps none of them.
package registrar

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server"
	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/files"
	"aether/mtls/spiffeid"
)

// size of a fleet.
type size struct {
	Services, Endpoints, Streams, Scope int
	Changes                             int           // a second
	Steady                              time.Duration // how long they are watched
}

func sizes() size {
	if os.Getenv("AETHER_BENCH_FULL") != "" {
		return size{Services: 3000, Endpoints: 100_000, Streams: 1000, Scope: 200, Changes: 50, Steady: 20 * time.Second}
	}
	return size{Services: 300, Endpoints: 10_000, Streams: 50, Scope: 20, Changes: 50, Steady: 3 * time.Second}
}

const (
	fleetEnv = "AETHER_BENCH_FLEET" // set in the process of the nodes
	patience = 5 * time.Minute
	window   = 1 << 20 // as the nodes' client has it
)

func TestMain(m *testing.M) {
	if job := os.Getenv(fleetEnv); job != "" {
		if err := fleet(job); err != nil {
			fmt.Fprintln(os.Stderr, "fleet:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serviceName(i int) model.ServiceName {
	return model.ServiceName{Namespace: fmt.Sprint("team-", i%40), Name: fmt.Sprint("service-", i)}
}

func endpoint(i int) *registrypb.ServiceEndpoint {
	e := storetest.HTTP(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), fmt.Sprint("node-", i%1000))
	e.Metadata = map[string]string{"version": "v1", "shard": strconv.Itoa(i % 8)}
	e.KubernetesMetadata.Namespace, e.KubernetesMetadata.PodName = "team-1", fmt.Sprint("service-1-7d9f8b6c5d-", i)
	e.KubernetesMetadata.NodeIp = "192.168.10.20"
	e.ContainerMetadata = &registrypb.ServiceEndpoint_ContainerMetadata{ContainerId: fmt.Sprintf("%064d", i), NetworkNamespace: "/var/run/netns/cni-0f8fad5b-d9cb-469f-a165"}
	return e
}

// store tells rows that it makes up, and the changes that it is given.
type store struct {
	size
	changes chan registry.Change
}

func (s *store) Watch(ctx context.Context, on func(registry.Change), _ func(error)) error {
	all := registry.Change{Whole: true}
	for i := range s.Endpoints {
		all.Rows = append(all.Rows, storetest.Rows("local", "local", serviceName(i%s.Services), endpoint(i))...)
	}
	on(all)
	all = registry.Change{}
	for {
		select {
		case c := <-s.changes:
			on(c)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (*store) Put(context.Context, model.ServiceName, *registrypb.ServiceEndpoint) error { return nil }
func (*store) Delete(context.Context, model.ServiceName, string, registry.Statement) error {
	return nil
}

// marks tell the changes of the two phases apart: the name under which a row says when
// it was changed.
var marks = map[string]string{"steady": "st", "draining": "dr"}

// change is a new state of row i, which says when it was made.
func (s *store) change(i int, h registrypb.ServiceEndpoint_Health, phase string) registry.Change {
	e := endpoint(i)
	e.Health = h
	e.Metadata[marks[phase]] = strconv.FormatInt(time.Now().UnixNano(), 10)
	return registry.Change{Rows: storetest.Rows("local", "local", serviceName(i%s.Services), e)}
}

// BenchmarkRegistrar tells what a fleet costs: the server's anonymous memory with
// all nodes connected, the time of all first snapshots and of a new one of everything,
// the processor at a steady rate of changes, and how late a node hears of one.
func BenchmarkRegistrar(b *testing.B) {
	sz := sizes()
	ca, err := devca.Open(b.TempDir(), "mesh.test", nil)
	if err != nil {
		b.Fatal(err)
	}
	self, err := ca.Issue(identity("aether-registrar"), time.Hour)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		st := &store{size: sz, changes: make(chan registry.Change)}
		s := server.New(server.Config{Store: st, Drain: -1, TLS: mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return self }, Named: true})})
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan error, 1)
		begun := time.Now()
		go func() { done <- s.Run(ctx, ln) }()
		<-s.Synced()
		b.ReportMetric(time.Since(begun).Seconds(), "s/load")
		debug.FreeOSMemory()
		b.ReportMetric(anonymous(b), "MB/state")

		f := startFleet(b, job{Addr: ln.Addr().String(), size: sz, CA: b.TempDir()}, ca)
		var up struct {
			Seconds float64
			Again   int
		}
		f.say("connect", &up)
		b.ReportMetric(up.Seconds, "s/all-snapshots")
		b.ReportMetric(float64(up.Again), "nodes-cut")
		b.ReportMetric(anonymous(b), "MB/peak")
		debug.FreeOSMemory()
		b.ReportMetric(anonymous(b), "MB/connected")
		var snap struct {
			Seconds float64
			Rows    int
		}
		f.say("snapshot", &snap)
		if snap.Rows != sz.Endpoints {
			b.Fatalf("a snapshot of everything had %d rows, want %d", snap.Rows, sz.Endpoints)
		}
		b.ReportMetric(snap.Seconds, "s/new-snapshot")

		// Steady: changes of rows anywhere.
		changes := st.steadily(b, func() {
			st.changes <- st.change(rand.IntN(sz.Endpoints), registrypb.ServiceEndpoint_HEALTHY, "steady")
		})
		var seen struct {
			Events        int
			P50, P99, Max float64 // milliseconds
		}
		f.say("seen steady", &seen)
		b.ReportMetric(float64(seen.Events)/float64(changes), "nodes/change")
		b.ReportMetric(seen.P99, "ms/steady-p99")

		// DRAINING of a row that everybody watches.
		const drains = 10
		for i := range drains {
			st.changes <- st.change(i*sz.Services, registrypb.ServiceEndpoint_DRAINING, "draining") // of service 0
			f.say("await "+strconv.Itoa((i+1)*sz.Streams), nil)
		}
		f.say("seen draining", &seen)
		if seen.Events != drains*sz.Streams {
			b.Fatalf("%d of %d were seen", seen.Events, drains*sz.Streams)
		}
		b.ReportMetric(seen.P50, "ms/draining-p50")
		b.ReportMetric(seen.P99, "ms/draining-p99")
		b.ReportMetric(seen.Max, "ms/draining-max")

		f.end()
		stop()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
}

// steadily makes changes for a while, and tells what of the processor this process took,
// and how many there were.
func (s *store) steadily(b *testing.B, change func()) (changes int) {
	b.Helper()
	user, system := processor(b)
	at := time.Now()
	tick := time.NewTicker(time.Second / time.Duration(s.Changes))
	defer tick.Stop()
	for time.Since(at) < s.Steady {
		<-tick.C
		change()
		changes++
	}
	u, k := processor(b)
	took := time.Since(at).Seconds()
	b.ReportMetric(100*(u+k-user-system).Seconds()/took, "%core/steady")
	b.ReportMetric(100*(k-system).Seconds()/took, "%core/steady-kernel")
	b.ReportMetric(float64(changes)/took, "changes/s")
	return changes
}

func identity(account string) spiffeid.ID {
	id, err := spiffeid.ForServiceAccount("mesh.test", "aether-system", account)
	if err != nil {
		panic(err) // it is a constant
	}
	return id
}

// anonymous is this process's anonymous memory, in MB of 2^20.
func anonymous(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(status), "RssAnon:")
	if !ok {
		b.Fatal("no RssAnon")
	}
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(kb) / 1024
}

// processor is the time that this process has had of it, by itself and in the kernel.
func processor(b *testing.B) (user, system time.Duration) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano()), time.Duration(u.Stime.Nano())
}

// job is what the process of the nodes is told.
type job struct {
	size
	Addr string
	CA   string
}

type fleetProcess struct {
	b   *testing.B
	cmd *exec.Cmd
	in  interface {
		Write([]byte) (int, error)
		Close() error
	}
	out *bufio.Reader
}

func startFleet(b *testing.B, j job, ca *devca.CA) *fleetProcess {
	b.Helper()
	if err := ca.WriteFiles(j.CA, "aether-system", "aether-agent", time.Hour); err != nil {
		b.Fatal(err)
	}
	enc, err := json.Marshal(j)
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fleetEnv+"="+string(enc))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	return &fleetProcess{b, cmd, in, bufio.NewReader(out)}
}

// say gives the fleet an order, and reads its answer into v.
func (f *fleetProcess) say(order string, v any) {
	f.b.Helper()
	if _, err := fmt.Fprintln(f.in, order); err != nil {
		f.b.Fatal(err)
	}
	line, err := f.out.ReadBytes('\n')
	if err != nil {
		f.b.Fatalf("%s: %v", order, err)
	}
	if v != nil {
		if err := json.Unmarshal(line, v); err != nil {
			f.b.Fatal(err)
		}
	}
}

func (f *fleetProcess) end() {
	f.in.Close()
	if err := f.cmd.Wait(); err != nil {
		f.b.Fatal(err)
	}
}

// fleet is the process of the nodes.
func fleet(arg string) error {
	var j job
	if err := json.Unmarshal([]byte(arg), &j); err != nil {
		return err
	}
	creds, err := j.credentials()
	if err != nil {
		return err
	}
	n := &nodes{late: map[string][]time.Duration{}, seen: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var answer any = struct{}{}
		switch order, arg, _ := strings.Cut(in.Text(), " "); order {
		case "connect":
			begun := time.Now()
			errs := make(chan error, j.Streams)
			for i := range j.Streams {
				go func() { errs <- n.watch(ctx, j, creds, i) }()
			}
			for range j.Streams {
				if err := <-errs; err != nil {
					return err
				}
			}
			answer = map[string]any{"Seconds": time.Since(begun).Seconds(), "Again": n.again.Load()}
		case "snapshot":
			conn, err := j.dial(creds)
			if err != nil {
				return err
			}
			begun := time.Now()
			once, end := context.WithTimeout(ctx, patience)
			rows, _, err := first(once, conn, &registrypb.WatchEndpointsRequest{})
			took := time.Since(begun)
			end()
			conn.Close()
			if err != nil {
				return err
			}
			answer = struct {
				Seconds float64
				Rows    int
			}{took.Seconds(), rows}
		case "await":
			want, err := strconv.Atoi(arg)
			if err != nil {
				return err
			}
			if err := n.await(want); err != nil {
				return err
			}
		case "seen":
			late := n.take(arg)
			slices.Sort(late)
			ms := func(q float64) float64 {
				if len(late) == 0 {
					return 0
				}
				return float64(late[int(q*float64(len(late)-1))].Microseconds()) / 1000
			}
			answer = map[string]any{"Events": len(late), "P50": ms(0.5), "P99": ms(0.99), "Max": ms(1)}
		}
		line, err := json.Marshal(answer)
		if err != nil {
			return err
		}
		fmt.Println(string(line))
	}
	return in.Err()
}

// nodes are what the fleet's nodes have seen.
type nodes struct {
	again atomic.Int64 // watches that broke off before they were complete

	mu   sync.Mutex
	late map[string][]time.Duration // of each event that says when it was made, by phase
	seen chan struct{}
}

func (n *nodes) saw(phase string, d time.Duration) {
	n.mu.Lock()
	n.late[phase] = append(n.late[phase], d)
	n.mu.Unlock()
	select {
	case n.seen <- struct{}{}:
	default:
	}
}

// take is what was seen of a phase.
func (n *nodes) take(phase string) []time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.late[phase])
}

func (n *nodes) await(events int) error {
	end := time.NewTimer(patience)
	defer end.Stop()
	for {
		n.mu.Lock()
		got := len(n.late["draining"])
		n.mu.Unlock()
		if got >= events {
			return nil
		}
		select {
		case <-n.seen:
		case <-end.C:
			return fmt.Errorf("%d of %d events came", got, events)
		}
	}
}

// watch connects a node, and returns once its first snapshot is complete.
func (n *nodes) watch(ctx context.Context, j job, creds credentials.TransportCredentials, i int) error {
	conn, err := j.dial(creds)
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(uint64(i), 0))
	req := &registrypb.WatchEndpointsRequest{ClusterName: "local", NodeName: fmt.Sprint("node-", i), Filter: &registrypb.ServiceFilter{}}
	for k, s := range rnd.Perm(j.Services)[:j.Scope] {
		if k == 0 {
			s = 0 // everybody watches one
		}
		req.Filter.Services = append(req.Filter.Services, serviceName(s).String())
	}
	_, stream, err := first(ctx, conn, req)
	for tries := 0; err != nil && tries < 5; tries++ { // as a node does: the machine has the whole fleet to itself
		n.again.Add(1)
		_, stream, err = first(ctx, conn, req)
	}
	if err != nil {
		return err
	}
	go func() {
		var e raw
		for stream.RecvMsg(&e) == nil {
			for phase, mark := range marks {
				if at, ok := stamp(e, mark); ok {
					n.saw(phase, time.Since(at))
				}
			}
		}
	}()
	return nil
}

// first watches until the first snapshot is complete, and counts its rows.
func first(ctx context.Context, conn *grpc.ClientConn, req *registrypb.WatchEndpointsRequest) (rows int, _ grpc.ClientStream, _ error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, registrypb.RegistrarService_WatchEndpoints_FullMethodName, grpc.WaitForReady(true))
	if err != nil {
		return 0, nil, err
	}
	if err := stream.SendMsg(req); err != nil {
		return 0, nil, err
	}
	if err := stream.CloseSend(); err != nil {
		return 0, nil, err
	}
	for {
		var e raw
		if err := stream.RecvMsg(&e); err != nil {
			return 0, nil, err
		}
		switch kind(e) {
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT:
			rows++
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE:
			return rows, stream, nil
		}
	}
}

func (j *job) credentials() (credentials.TransportCredentials, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var svid *mtls.SVID
	var last error
	ref := mtls.Ref{Container: "fleet", Namespace: "aether-system", Account: "aether-agent", ID: identity("aether-agent")}
	if err := files.New(files.Config{Dir: j.CA}).Watch(ctx, ref, func(s *mtls.SVID, err error) {
		if last = err; s != nil {
			svid = s
			cancel()
		}
	}); svid == nil {
		return nil, errors.Join(err, last)
	}
	return credentials.NewTLS(mtls.ClientConfig(mtls.Client{SVID: svid, SNI: "8443", ALPN: []string{"h2"}, Pin: identity("aether-registrar")})), nil
}

func (j *job) dial(creds credentials.TransportCredentials) (*grpc.ClientConn, error) {
	return grpc.NewClient(j.Addr, grpc.WithTransportCredentials(creds), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{})),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(2*window), // and so no ping after every event
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(1<<10))
}

// raw is a message that nobody has decoded.
type raw []byte

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, err := proto.Marshal(v.(proto.Message))
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	r := v.(*raw)
	*r = append((*r)[:0], data.Materialize()...)
	return nil
}

// kind is the type of an event.
func kind(e raw) registrypb.WatchEndpointsResponse_EventType {
	for b := []byte(e); len(b) > 0; {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0
		}
		b = b[n:]
		if num == 1 && typ == protowire.VarintType {
			v, _ := protowire.ConsumeVarint(b)
			return registrypb.WatchEndpointsResponse_EventType(v)
		}
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return 0
		}
		b = b[n:]
	}
	return 0
}

// stamp is when an event's row was changed, if it says so under mark.
func stamp(e raw, mark string) (time.Time, bool) {
	// An entry of a map as it stands on the wire: a time has 19 digits.
	_, rest, ok := bytes.Cut(e, []byte("\x0a\x02"+mark+"\x12\x13"))
	if !ok || len(rest) < 19 {
		return time.Time{}, false
	}
	ns, err := strconv.ParseInt(string(rest[:19]), 10, 64)
	return time.Unix(0, ns), err == nil
}
