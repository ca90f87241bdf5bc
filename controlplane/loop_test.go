package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/dataplane/snapshot/snapshottest"
)

// target remembers what was applied, and when.
type target struct {
	mu    sync.Mutex
	snaps []*snapshot.Snapshot
	at    []time.Time
	pods  []model.Workload
}

func (t *target) Apply(s *snapshot.Snapshot, w []model.Workload) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.snaps, t.at, t.pods = append(t.snaps, s), append(t.at, time.Now()), w
}

func (t *target) last() *snapshot.Snapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.snaps) == 0 {
		return nil
	}
	return t.snaps[len(t.snaps)-1]
}

func (t *target) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.snaps)
}

// world is a loop that runs in virtual time.
type world struct {
	t      *testing.T
	target *target
	loop   *Loop
	log    *bytes.Buffer
	stop   func()
}

func start(t *testing.T, cfg Config, sources ...string) (*world, []*Source) {
	t.Helper()
	w := &world{t: t, target: &target{}, log: &bytes.Buffer{}}
	cfg.Target, cfg.Log = w.target, slog.New(slog.NewTextHandler(w.log, nil))
	cfg.Node, cfg.Domain, cfg.TrustDomain = "n1", model.DefaultDomain, "td"
	w.loop = New(cfg)
	var out []*Source
	for _, n := range sources {
		out = append(out, w.loop.Source(n, SourceOptions{Local: n == "local", Final: n == "files"}))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.loop.Run(ctx) }()
	once := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	w.stop = once
	t.Cleanup(once)
	synctest.Wait()
	return w, out
}

// settled is when everything that was said must be in force.
func (w *world) settled() {
	<-time.After(holdObjects)
	synctest.Wait()
}

func batch(t *testing.T, text string) input.Batch {
	t.Helper()
	return input.FullBatch(modeltest.Mesh(t, text), nil, input.Settings{})
}

var cart = model.ServiceName{Namespace: "shop", Name: "cart"}

func (w *world) service(n model.ServiceName) *snapshot.Service { return w.target.last().Service(n) }

// endpoints are the addresses of a service's port.
func (w *world) endpoints(n model.ServiceName, port uint16) []string {
	var out []string
	s := w.target.last()
	if svc := s.Service(n); svc != nil && svc.Port(port) != nil {
		for _, e := range s.Endpoints(svc.Port(port).Backend).All() {
			out = append(out, e.Pod)
		}
	}
	return out
}

func TestPublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "file")
		waited := make(chan error, 1)
		ctx, cancel := context.WithCancel(context.Background())
		go func() { waited <- w.loop.Wait(ctx, 2) }()
		bad := model.Problem{Object: "Pod shop/x", Where: "a.yaml:3", Reason: "no"}
		first := batch(t, "pods shop/cart 8080")
		first.Problems[bad.Object] = []model.Problem{bad}
		src[0].Replace(first)
		w.settled()
		select {
		case <-waited:
			t.Fatal("sequence number 2 is in force after one publish")
		default:
		}
		if w.target.count() != 1 || w.target.last().Version() != 1 {
			t.Fatalf("%d snapshots", w.target.count())
		}
		src[0].Apply(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c": {{
			Namespace: "shop", Name: "web-1", Account: "web", ContainerID: "c", SPIFFEID: "spiffe://td/ns/shop/sa/web",
		}}}}})
		if err := <-waited; err != nil {
			t.Fatal(err)
		}
		w.settled()
		s := w.loop.State()
		bad.Since = s.Problems[0].Since // TestProblemAges
		if s.Seq != 2 || len(w.target.pods) != 1 || w.target.last().Version() != 2 || len(s.Problems) == 0 || s.Problems[0] != bad || !s.Synced {
			t.Errorf("%+v, %d pods", s, len(w.target.pods))
		}
		// What is mended is not told any more; what comes again is logged again.
		src[0].Apply(input.Batch{Tables: input.Tables{Problems: map[string][]model.Problem{bad.Object: nil}}})
		w.settled()
		if s := w.loop.State(); s.Seq != 2 || slices.Contains(s.Problems, bad) {
			t.Errorf("a problem that is mended: %+v", s)
		}
		src[0].Apply(input.Batch{Tables: input.Tables{Problems: map[string][]model.Problem{bad.Object: {bad}}}})
		w.settled()
		w.stop()
		if n := strings.Count(w.log.String(), "Pod shop/x"); n != 2 {
			t.Errorf("the problem was logged %d times, want once a time that it appears:\n%s", n, w.log.String())
		}
		cancel()
		if err := w.loop.Wait(ctx, 9); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestNothingBeforeAll: nothing is published before every source has said its whole state,
// whatever they have said of parts of it.
func TestNothingBeforeAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "file", "registry", "kube")
		src[0].Replace(batch(t, "pods shop/cart 8080"))
		src[1].Replace(input.Batch{})
		src[2].Apply(batch(t, "filter shop/deny scope=inbound target=cart rbac policy=p;ns:nobody"))
		time.Sleep(time.Hour)
		synctest.Wait()
		if w.target.count() != 0 || w.loop.State().Synced || w.loop.State().Seq != 0 {
			t.Fatal("published without the third source")
		}
		src[2].Replace(input.Batch{})
		w.settled()
		if w.target.count() != 1 || !w.loop.State().Synced || w.loop.WaitSynced(t.Context()) != nil {
			t.Fatalf("%d published", w.target.count())
		}
	})
}

// TestHoldOff: endpoints are in force within 10 ms however many follow, all else within
// 250 ms; what comes alone waits for its quiet period only.
func TestHoldOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "registry")
		src[0].Replace(batch(t, "pods shop/cart 8080\nservice shop/cart 10.96.0.1"))
		w.settled()
		// since is how long ago something was said when it came into force.
		say := func(times int, every time.Duration, b func(i int) input.Batch) (first time.Duration, published int) {
			begin, before := time.Now(), w.target.count()
			for i := range times {
				src[0].Apply(b(i))
				time.Sleep(every)
			}
			w.settled()
			return w.target.at[before].Sub(begin), w.target.count() - before
		}
		rows := func(i int) input.Batch {
			b := batch(t, "pods shop/cart 8080")
			b.Endpoints[cart][0].Weight = uint32(i + 1)
			return input.Batch{Tables: input.Tables{Endpoints: b.Endpoints}}
		}
		objects := func(i int) input.Batch {
			return input.Batch{Tables: input.Tables{Services: batch(t, fmt.Sprintf("service shop/cart 10.96.0.%d", 2+i)).Services}}
		}
		for _, tt := range []struct {
			name      string
			times     int
			every     time.Duration
			batch     func(int) input.Batch
			first     time.Duration
			published int
		}{
			{"one row", 1, 0, rows, quietRows, 1},
			{"rows without end", 100, time.Millisecond, rows, holdRows, 10},
			{"an object", 1, 0, objects, quietObjects, 1},
			{"objects without end", 100, 5 * time.Millisecond, objects, holdObjects, 2},
		} {
			first, published := say(tt.times, tt.every, tt.batch)
			if first != tt.first || published < tt.published || published > tt.published+1 {
				t.Errorf("%s: in force after %s, %d published; want %s, %d", tt.name, first, published, tt.first, tt.published)
			}
		}
		// Rows do not wait for objects.
		begin, before := time.Now(), w.target.count()
		src[0].Apply(objects(100))
		src[0].Apply(rows(100))
		w.settled()
		if d := w.target.at[before].Sub(begin); d != quietRows {
			t.Errorf("rows among objects: %s", d)
		}
		// And nothing waits for who asks for it.
		begin, before = time.Now(), w.target.count()
		src[0].Apply(objects(101))
		if err := src[0].Flush(t.Context()); err != nil || time.Since(begin) != 0 || w.target.count() != before+1 {
			t.Errorf("Flush: %v, %s", err, time.Since(begin))
		}
	})
}

// TestRetained (contract 4.12): a service whose HTTP rows go is kept 90 s and refuses;
// rows replace it at once, and so do the ports of its generated Service.
func TestRetained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "registry", "kube")
		rows := batch(t, "pods shop/cart 8080,9000=tcp")
		src[0].Replace(input.Batch{Tables: input.Tables{Endpoints: rows.Endpoints}})
		src[1].Replace(input.Batch{})
		w.settled()
		none := input.Batch{Tables: input.Tables{Endpoints: map[model.ServiceName][]model.Endpoint{cart: nil}}}
		gone := time.Now()
		src[0].Apply(none)
		w.settled()
		kept := w.service(cart)
		if kept == nil || len(kept.Ports) != 1 || kept.Port(8080) == nil || len(w.endpoints(cart, 8080)) != 0 {
			t.Fatalf("without rows: %+v", kept)
		}
		if m := w.loop.Mesh(); len(m.Retained) != 1 || m.Retained[0].Service != cart || !slices.Equal(m.Retained[0].Ports, []uint16{8080}) {
			t.Errorf("%+v", m.Retained)
		}
		// A source that says its state once more changes nothing of that.
		time.Sleep(retention / 2)
		src[0].Replace(input.Batch{})
		w.settled()
		time.Sleep(time.Until(gone.Add(retention)) - time.Millisecond)
		synctest.Wait()
		if w.service(cart) == nil {
			t.Fatal("gone before its time")
		}
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		if w.service(cart) != nil || len(w.loop.Mesh().Retained) > 0 {
			t.Fatalf("kept after 90 s: %+v", w.service(cart))
		}
		// Rows of another kind are positive evidence.
		src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: rows.Endpoints}})
		w.settled()
		src[0].Apply(none)
		w.settled()
		src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: batch(t, "pods shop/cart 9000=tcp").Endpoints}})
		w.settled()
		if s := w.service(cart); s.Port(8080) != nil || s.Port(9000) == nil || len(w.loop.Mesh().Retained) > 0 {
			t.Errorf("replaced: %+v", s)
		}
		// TCP alone is not kept.
		src[0].Apply(none)
		w.settled()
		if w.service(cart) != nil {
			t.Errorf("TCP: %+v", w.service(cart))
		}
		if len(w.loop.Mesh().Retained) > 0 {
			t.Error("kept without HTTP ports")
		}
		// The ports of the generated Service count at once, in the same publish.
		src[0].Apply(input.Batch{Tables: input.Tables{Endpoints: rows.Endpoints}})
		src[1].Apply(input.Batch{Tables: input.Tables{Services: batch(t, "service shop/cart 10.96.0.1 7070").Services}})
		w.settled()
		before := w.target.count()
		src[0].Apply(none)
		w.settled()
		if s := w.target.snaps[before].Service(cart); s.Port(8080) != nil || s.Port(7070) == nil {
			t.Errorf("with a generated Service: %+v", s.Ports)
		}
	})
}

// TestFinal: what files remove is gone.
func TestFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "files", "registry")
		src[0].Replace(batch(t, "pods shop/cart 8080\npods shop/db 8080"))
		src[1].Replace(batch(t, "pods shop/db 8080"))
		w.settled()
		src[0].Replace(input.Batch{})
		w.settled()
		db := model.ServiceName{Namespace: "shop", Name: "db"}
		if w.service(cart) != nil || len(w.endpoints(db, 8080)) != 1 || len(w.loop.Mesh().Retained) != 0 {
			t.Errorf("%+v", w.service(cart))
		}
		src[1].Replace(input.Batch{})
		w.settled()
		if w.service(db) == nil || len(w.loop.Mesh().Retained) != 1 {
			t.Errorf("%+v", w.service(db))
		}
	})
}

// TestSeveralSources: what comes of two sources that speak of one thing, and that it is told.
func TestSeveralSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "local", "file", "kube")
		replace := func(local, file, kube string) {
			t.Helper()
			for i, text := range []string{local, file, kube} {
				b := batch(t, text)
				b.Settings = nil
				src[i].Replace(b)
			}
			w.settled()
		}
		told := func(object string, parts ...string) {
			t.Helper()
			for _, p := range w.loop.State().Problems {
				if p.Object == object {
					for _, part := range parts {
						if !strings.Contains(p.Reason, part) {
							t.Errorf("%s: %q says nothing of %q", object, p.Reason, part)
						}
					}
					return
				}
			}
			if len(parts) > 0 {
				t.Errorf("nothing is told of %s: %+v", object, w.loop.State().Problems)
			}
		}
		// Equal things are no conflict.
		replace("", "service shop/cart 10.96.0.1\npods shop/cart 8080", "service shop/cart 10.96.0.1")
		if p := w.loop.State().Problems; len(p) > 0 {
			t.Errorf("%+v", p)
		}
		// Services and routes: the first.
		replace("", "service shop/cart 10.96.0.1\npods shop/cart 8080\nroute shop/r cart\nrule all set=x:1", "service shop/cart 10.96.0.2\nroute shop/r cart\nrule all set=x:2")
		told("Service shop/cart", "file and kube", "what file says is in force")
		told("HTTPRoute shop/r", "file and kube", "what file says is in force")
		if s := w.target.last(); w.service(cart) == nil || s.Address(batch(t, "service shop/x 10.96.0.1").Services[model.ServiceName{Namespace: "shop", Name: "x"}][0].ClusterIPs[0]) == nil {
			t.Error("the file's address is not in force")
		}
		// Filters: nobody knows which policy was meant.
		replace("", "pods shop/cart 8080\nservice shop/cart 10.96.0.1\nfilter shop/f scope=chain target=cart rbac policy=p;ns:shop", "filter shop/f scope=chain target=cart rbac policy=p;ns:pay")
		told("HTTPFilter shop/f", "file and kube", "refused")
		if self := w.service(cart).Port(8080).Self; self.Invalid == "" {
			t.Error("one of two policies is in force")
		}
		// Rows: all, of one address the first's; the local source is no conflict.
		near := batch(t, "pods shop/cart*2 8080")
		far := batch(t, "pods shop/cart*3 8080")
		for i := range near.Endpoints[cart] {
			near.Endpoints[cart][i].Health = model.Unhealthy
		}
		src[0].Replace(input.Batch{Tables: input.Tables{Endpoints: near.Endpoints}})
		src[1].Replace(input.Batch{})
		src[2].Replace(input.Batch{Tables: input.Tables{Endpoints: far.Endpoints}})
		w.settled()
		if p := w.loop.State().Problems; len(p) > 0 {
			t.Errorf("%+v", p)
		}
		var health []model.Health
		s := w.target.last()
		for _, e := range s.Endpoints(s.Service(cart).Port(8080).Backend).All() {
			health = append(health, e.Health)
		}
		if !slices.Equal(health, []model.Health{model.Unhealthy, model.Unhealthy, far.Endpoints[cart][2].Health}) {
			t.Errorf("health %v", health)
		}
		src[0].Replace(input.Batch{})
		src[1].Replace(input.Batch{Tables: input.Tables{Endpoints: near.Endpoints}})
		w.settled()
		told("ServiceAccount shop/cart", "file and kube")
		// And what is mended is not told.
		src[2].Replace(input.Batch{})
		w.settled()
		if p := w.loop.State().Problems; len(p) > 0 {
			t.Errorf("%+v", p)
		}
	})
}

// TestSettings: they reach the snapshot and OnSettings, are those of the first source
// that says any, and what is not built is told.
func TestSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []input.Settings
		var named map[string]input.Settings
		w, src := start(t, Config{Settings: input.Settings{AccessLogs: true}, OnSettings: func(s input.Settings, of map[string]input.Settings) { got, named = append(got, s), of }}, "file", "kube")
		src[0].Replace(input.Batch{})
		src[1].Replace(input.Batch{})
		w.settled()
		if len(got) != 1 || !got[0].AccessLogs {
			t.Fatalf("%+v", got)
		}
		src[1].Apply(input.Batch{Settings: &input.Settings{Semantics: model.GatewayAPI, Tracing: true}})
		w.settled()
		if w.target.last().Semantics() != model.GatewayAPI || len(got) != 2 || got[1].AccessLogs {
			t.Errorf("%+v", got)
		}
		if p := w.loop.State().Problems; len(p) != 1 || !strings.Contains(p[0].Reason, "tracing") {
			t.Errorf("%+v", p)
		}
		src[0].Apply(input.Batch{Settings: &input.Settings{SameNode: model.InProcess}, Locality: &input.Locality{Region: "r", Zone: "z"}})
		w.settled()
		if m := w.loop.Mesh(); w.target.last().Semantics() != model.Aether || len(got) != 3 || m.Region != "r" || m.Zone != "z" || m.SameNode != model.InProcess {
			t.Errorf("%+v", got)
		}
		if p := w.loop.State().Problems; len(p) != 1 || !strings.Contains(p[0].Reason, "file and kube") {
			t.Errorf("%+v", p)
		}
		// The one without a MeshConfig, or whose MeshConfig has gone, contradicts nobody.
		src[0].Apply(input.Batch{Settings: &input.Settings{AccessLogs: true}})
		w.settled()
		if p := w.loop.State().Problems; len(p) != 1 || !strings.Contains(p[0].Reason, "tracing") || w.target.last().Semantics() != model.GatewayAPI {
			t.Errorf("%+v, %v", p, w.target.last().Semantics())
		}
		// Pods of a namespace: field by field, over what is the mesh's by then.
		yes, few := true, uint8(3)
		src[1].Apply(input.Batch{Tables: input.Tables{Namespaces: map[string][]input.Override{"shop": {{AccessLogSuccess: &few}}, "pay": {{Tracing: &yes, EmitStatsPod: &yes}}, "same": {{}}}}})
		w.settled()
		at := w.loop.State().Seq
		if len(named) != 2 || named["shop"] != (input.Settings{Semantics: model.GatewayAPI, Tracing: true, AccessLogSuccess: 3}) || !named["pay"].EmitStatsPod {
			t.Errorf("%+v", named)
		}
		src[1].Apply(input.Batch{Settings: &input.Settings{AccessLogs: true}})
		w.settled()
		if len(named) != 2 || named["shop"] != (input.Settings{AccessLogs: true, AccessLogSuccess: 3}) || !named["pay"].Tracing || w.loop.State().Seq == at {
			t.Errorf("%+v", named)
		}
		if p := w.loop.State().Problems; len(p) != 1 || p[0].Object != "MeshConfig of namespace pay" || !strings.Contains(p[0].Reason, "makes no traces") {
			t.Errorf("%+v", p)
		}
		src[0].Apply(input.Batch{Tables: input.Tables{Namespaces: map[string][]input.Override{"shop": {{EmitStatsPod: &yes}}}}})
		src[1].Apply(input.Batch{Tables: input.Tables{Namespaces: map[string][]input.Override{"pay": nil}}})
		w.settled()
		if p := w.loop.State().Problems; len(named) != 1 || !named["shop"].EmitStatsPod || named["shop"].AccessLogSuccess != 0 || len(p) != 1 || !strings.Contains(p[0].Reason, "file and kube") {
			t.Errorf("the first source's: %+v, %+v", named, p)
		}
	})
}

// TestNeeds (contract 9.9, decision 033): services of this node's pods, what these declare, and users' Services and
// those with UDP that have an address, before anything can be published, and again when they change.
func TestNeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got [][]model.ServiceName
		w, src := start(t, Config{OnNeeds: func(n []model.ServiceName) { got = append(got, n) }}, "local", "registry", "kube")
		src[0].Replace(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c": {{Namespace: "shop", Name: "web-1", Account: "web", ContainerID: "c", SPIFFEID: "spiffe://td/x", Upstreams: []model.ServiceName{{Namespace: "pay", Name: "api"}}}}}}})
		w.settled()
		others := make(chan error, 1)
		go func() { others <- src[1].WaitForOthers(t.Context()) }()
		synctest.Wait()
		if len(others) > 0 {
			t.Error("Kubernetes has not been heard")
		}
		src[2].Replace(batch(t, "user shop/cart 10.96.0.1 80:80\nuser shop/headless 80:80\nservice shop/generated 10.96.0.2 8080,9000=tcp\nservice shop/dns 10.96.0.3 53=tcp,5353=udp"))
		if err := <-others; err != nil {
			t.Error(err)
		}
		if len(got) != 2 || fmt.Sprint(got[1]) != "[pay/api shop/cart shop/dns shop/web]" || w.target.count() != 0 {
			t.Fatalf("%v", got)
		}
		src[2].Apply(input.Batch{Tables: input.Tables{Services: map[model.ServiceName][]model.Service{cart: nil}}})
		src[1].Replace(input.Batch{})
		w.settled()
		if len(got) != 3 || fmt.Sprint(got[2]) != "[pay/api shop/dns shop/web]" {
			t.Errorf("%v", got)
		}
		src[0].Replace(input.Batch{})
		w.settled()
		if len(got) != 4 || fmt.Sprint(got[3]) != "[shop/dns]" {
			t.Errorf("what is left was told as: %v", got)
		}
	})
}

// TestManyBadRows: thousands of problems hold nothing up, are counted, and do not flood the log or the report.
func TestManyBadRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{}, "registry")
		b := batch(t, "pods shop/cart 8080")
		for i := range 5000 {
			o := fmt.Sprintf("row %d", i)
			b.Problems[o] = []model.Problem{{Object: o, Reason: "no_ports"}}
		}
		src[0].Replace(b)
		w.settled()
		w.stop()
		r := w.loop.Report()
		if r.ProblemsTotal != 5000 || len(r.Problems) != maxReported || strings.Count(w.log.String(), "row ") != maxLogged || !strings.Contains(w.log.String(), "more=4900") || w.service(cart) == nil {
			t.Errorf("%d problems, %d reported, %d logged", r.ProblemsTotal, len(r.Problems), strings.Count(w.log.String(), "row "))
		}
	})
}

// merge is what the sources' meshes are together, by decision 023, worked out anew.
func merge(of []*model.Mesh) *model.Mesh {
	out := &model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td", Node: "n1"}
	located := false
	services, routes, filters, catalog := map[model.ServiceName]bool{}, map[input.RouteKey]bool{}, map[model.ServiceName][]model.HTTPFilter{}, map[model.ServiceName]bool{}
	pods, rows, policies := map[string]bool{}, map[string]bool{}, map[model.ServiceName]bool{}
	for _, m := range of {
		b := input.FullBatch(m, nil, input.Settings{})
		if !located && m.Region+m.Zone != "" {
			located, out.Region, out.Zone = true, m.Region, m.Zone
		}
		for n, list := range b.Services {
			if !services[n] {
				out.Services = append(out.Services, list...)
			}
			services[n] = true
		}
		for n, list := range b.Routes {
			if !routes[n] {
				out.Routes = append(out.Routes, list...)
			}
			routes[n] = true
		}
		for n, list := range b.Filters {
			if filters[n] == nil {
				filters[n] = list
			} else if first := filters[n]; !reflect.DeepEqual(first, list) {
				out.Filters = append(out.Filters, list...)
			}
		}
		for n, list := range b.Policies {
			if !policies[n] {
				out.Policies = append(out.Policies, list...)
			}
			policies[n] = true
		}
		for c, list := range b.Workloads {
			if !pods[c] {
				out.Workloads = append(out.Workloads, list...)
			}
			pods[c] = true
		}
		mine := map[string]bool{}
		for _, e := range m.Endpoints {
			k := e.Service.String() + " " + e.IP.Unmap().String()
			if !rows[k] {
				out.Endpoints = append(out.Endpoints, e)
			}
			mine[k] = true
		}
		for k := range mine {
			rows[k] = true
		}
		for n := range b.Catalog {
			if !catalog[n] {
				out.Catalog = append(out.Catalog, n)
			}
			catalog[n] = true
		}
		out.Retained = append(out.Retained, m.Retained...)
	}
	for _, list := range filters {
		out.Filters = append(out.Filters, list...)
	}
	return out
}

// random is a mesh of a source, whose settings nobody says.
func random(r *rand.Rand) *model.Mesh {
	m := modeltest.RandomMesh(r)
	if r.IntN(2) == 0 {
		m = modeltest.LivelyMesh(r)
	}
	m.Semantics, m.SameNode = 0, 0
	return m
}

// TestConvergence: whatever sources say, in parts or whole, in any order and at any time, the
// mesh ends as that of their last states put together, and what is in force is what
// that compiles to; a third of the time with a stop and a start from the last good state between.
func TestConvergence(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 6))
			file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
			names := []string{"file", "registry", "kube"}
			w, src := start(t, Config{LastGood: file, UDSDir: model.DefaultUDSDir}, names...)
			is := make([]*model.Mesh, len(names))
			for range 20 {
				i := r.IntN(len(src))
				next := random(r)
				if is[i] == nil || r.IntN(3) == 0 {
					src[i].Replace(input.FullBatch(next, nil, input.Settings{}))
					is[i] = next
				} else {
					was, now := input.FullBatch(is[i], nil, input.Settings{}), input.FullBatch(next, nil, input.Settings{})
					src[i].Apply(was.Diff(&now, input.Settings{}))
					is[i] = next
				}
				switch r.IntN(8) {
				case 0:
					time.Sleep(time.Duration(r.IntN(int(2 * holdObjects))))
				case 1:
					time.Sleep(time.Duration(r.IntN(int(2 * retention))))
				case 2:
					if is[0] == nil || is[1] == nil || is[2] == nil {
						continue
					}
					w.settled()
					w.stop()
					w, src = start(t, Config{LastGood: file, UDSDir: model.DefaultUDSDir}, names...)
					if w.target.count() != 1 {
						t.Fatalf("seed %d: %d published from the last good state", seed, w.target.count())
					}
					for k := range src { // of pods nothing is kept
						m := *is[k]
						m.Workloads = nil
						is[k] = &m
					}
				}
			}
			for i := range src {
				if is[i] == nil {
					src[i].Replace(input.Batch{})
					is[i] = &model.Mesh{}
				}
			}
			w.settled()
			time.Sleep(2 * retention) // then nothing is kept by time
			synctest.Wait()
			got := w.loop.Mesh()
			want := merge(is)
			a, _ := compile.Compile(want)
			if b, c := snapshottest.Text(w.target.last()), snapshottest.Text(a); b != c {
				t.Fatalf("seed %d: in force\n%s\nwant\n%s", seed, b, c)
			}
			d, _ := compile.Compile(got)
			if b, c := snapshottest.Text(d), snapshottest.Text(a); b != c {
				t.Fatalf("seed %d: Mesh compiles to\n%s\nwant\n%s", seed, b, c)
			}
		})
	}
}
