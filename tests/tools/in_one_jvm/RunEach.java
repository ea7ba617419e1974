import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs the main method of a class once for each line of standard input, whose words tabs separate, and prints a line
 * with a form feed after each: the start of a JVM costs more than most of Kafka's tools do.
 */
public class RunEach {
    private static final class Ended extends RuntimeException {
    }

    public static void main(String[] args) throws Exception {
        Exit.setExitProcedure((status, message) -> {
            throw new Ended();
        });
        Method main = Class.forName(args[0]).getMethod("main", String[].class);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            try {
                main.invoke(null, (Object) line.split("\t"));
            } catch (InvocationTargetException thrown) {
                if (!(thrown.getCause() instanceof Ended)) {
                    thrown.getCause().printStackTrace();
                }
            }
            System.err.flush();
            System.out.println("\f");
            System.out.flush();
        }
        System.exit(0); // whatever threads a tool has left
    }
}
