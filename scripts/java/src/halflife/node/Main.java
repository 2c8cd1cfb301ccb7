package halflife.node;

import java.io.IOException;
import java.io.InputStream;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.elasticsearch.common.logging.LogConfigurator;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.node.InternalSettingsPreparer;
import org.elasticsearch.node.Node;
import org.elasticsearch.plugins.PluginsLoader;

/**
 * Boots one Elasticsearch node inside this virtual machine and ends it in an orderly way.
 *
 * <p>Arguments: home folder, configuration folder, pid file, and optionally the process id of the parent to which
 * this node is tied. A tied node ends when the parent is gone, however it went: the end of standard input (a pipe
 * whose other end only the parent holds) says so at once, and a look at the parent each second covers the case that
 * a forked sibling still holds a copy of the pipe.
 */
public final class Main {
    /** After this time without an end, the end is forced. */
    private static final long CLOSE_SECONDS = Long.getLong("halflife.close.seconds", 15);

    /** Kept before logging takes the standard streams over: what is fatal goes to whoever started us. */
    private static final PrintStream CONSOLE = System.err;

    private Main() {}

    public static void main(String[] args) throws Exception {
        // Has to come before any class with a logger is initialised: their static initialisers fail without it.
        LogConfigurator.configureESLogging();
        Path home = Path.of(args[0]);
        Path config = Path.of(args[1]);
        Path pidFile = Path.of(args[2]);
        Optional<Long> parent = args.length > 3 ? Optional.of(Long.parseLong(args[3])) : Optional.empty();

        if (parent.isPresent()) {
            endWith(parent.get());
        }
        Settings fixed = Settings.builder().put("path.home", home.toString()).build();
        Environment environment = InternalSettingsPreparer.prepareEnvironment(
            fixed, Map.of(), config, () -> { throw new IllegalStateException("node.name is missing from the configuration"); });
        LogConfigurator.setNodeName(Node.NODE_NAME_SETTING.get(environment.settings()));
        LogConfigurator.configure(environment, false);

        Node node = null;
        try {
            PluginsLoader plugins = PluginsLoader.createPluginsLoader(
                PluginsLoader.loadModulesBundles(environment.modulesDir(), false),
                PluginsLoader.loadPluginsBundles(environment.pluginsDir(), false),
                Map.of(),
                false);
            node = new Node(environment, plugins);
            closeAtExit(node, pidFile);
            node.start();
        } catch (Throwable failure) {
            report(failure);
            System.exit(1);
        }
        new CountDownLatch(1).await();
    }

    /** Write the chain of causes, one line each and no stack trace: the starter shows the last of them to its user. */
    private static void report(Throwable failure) {
        org.apache.logging.log4j.LogManager.getLogger(Main.class).error("node did not start", failure);
        for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
            String message = cause.getMessage() == null ? "" : ": " + cause.getMessage().strip().replace('\n', ' ');
            CONSOLE.println("FATAL " + cause.getClass().getSimpleName() + message);
        }
    }

    private static void closeAtExit(Node node, Path pidFile) {
        Thread closer = new Thread(() -> {
            haltAfter(CLOSE_SECONDS + 5);
            try {
                node.prepareForClose();
                node.close();
                node.awaitClose(CLOSE_SECONDS, TimeUnit.SECONDS);
                Files.deleteIfExists(pidFile);
            } catch (IOException | InterruptedException failure) {
                CONSOLE.println("FATAL while closing: " + failure);
            }
        }, "halflife-close");
        Runtime.getRuntime().addShutdownHook(closer);
    }

    private static void haltAfter(long seconds) {
        daemon("halflife-halt", () -> {
            Thread.sleep(TimeUnit.SECONDS.toMillis(seconds));
            Runtime.getRuntime().halt(2);
        });
    }

    private static void endWith(long parent) {
        daemon("halflife-parent-pipe", () -> {
            InputStream pipe = System.in;
            while (pipe.read() >= 0) {
                // Whatever is written is of no interest; only the end is.
            }
            System.exit(0);
        });
        daemon("halflife-parent-pid", () -> {
            while (ProcessHandle.current().parent().map(ProcessHandle::pid).orElse(-1L) == parent) {
                Thread.sleep(1000);
            }
            System.exit(0);
        });
    }

    private interface Task {
        void run() throws Exception;
    }

    private static void daemon(String name, Task task) {
        Thread thread = new Thread(() -> {
            try {
                task.run();
            } catch (Exception failure) {
                // A pipe that breaks is a pipe that ended.
                System.exit(0);
            }
        }, name);
        thread.setDaemon(true);
        thread.start();
    }
}
